"""Divide sequences among ranks: tree costs, contiguous groups (paper Algorithm 4), subtrees dealt out, local search."""
