"""Attention of a chunk: one interface, and a provider per kind of kernel."""
