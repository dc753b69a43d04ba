"""Layers that are copies of one another: passes run over a few of them, and stages are repeated for the others."""
