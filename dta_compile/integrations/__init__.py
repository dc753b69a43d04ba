"""Adapters for other packages: our functions behind their interfaces, and replacements while Dynamo traces."""
