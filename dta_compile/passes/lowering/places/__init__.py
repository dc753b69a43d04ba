"""Rewrite values that have several rows per token, called slots: its heads, its experts or the streams of a model."""
