"""Mixtures of experts as people write them: rows that a condition or a sort selects, as values over all tokens."""
