"""Replacements for layers of single models of transformers."""
