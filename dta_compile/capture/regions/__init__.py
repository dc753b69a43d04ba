"""Layers of one class, which Dynamo traces once."""
