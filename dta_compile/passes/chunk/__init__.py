"""The token region as a graph of one chunk, and its LM head without materialised logits."""
