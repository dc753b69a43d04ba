"""Attention of a chunk: one interface, a provider per kind of kernel."""
