"""Rows: where every token of a batch lives in the tree, and the values that are kept by row."""
