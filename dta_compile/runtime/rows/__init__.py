"""Rows: the map between `[B, S]` tokens and rows of the prefix tree, and buffers of values by row."""
