"""Verdicts on attention masks, from terms and facts alone: whether one is causal, and what that takes for granted."""
