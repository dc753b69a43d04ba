"""Layout inference: which dimensions of every value run over sequences and tokens, and which operators mix tokens."""
