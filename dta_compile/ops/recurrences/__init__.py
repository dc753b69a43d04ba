"""Recurrent mixers: what a token makes of a running state, computed in blocks over runs of tokens of a tree."""
