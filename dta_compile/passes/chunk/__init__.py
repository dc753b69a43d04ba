"""The token region as a function of one chunk, and its head without logits."""
