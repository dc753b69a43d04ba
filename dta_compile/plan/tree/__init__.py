"""Prefix tree of a batch: lexicographic order, tree, leaf order, and its partition into chunks."""
