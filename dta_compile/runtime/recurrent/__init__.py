"""Recurrences over a chunk and the path: from the state above it to the states at chosen depths of its spine."""
