"""Cuts of the lowered graph into prologue, trunk, head and epilogue, and the values that pass between them."""
