"""Sequences divided among ranks: what a division costs, Algorithm 4 of the paper, subtrees dealt out, exchanges."""
