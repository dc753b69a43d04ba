"""Recurrent token mixers over a forest of runs of tokens with one common initial state: forward and backward."""
