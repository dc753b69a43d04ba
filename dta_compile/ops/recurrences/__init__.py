"""Recurrent token mixers: forward and backward over a forest of runs of tokens with a common initial state."""
