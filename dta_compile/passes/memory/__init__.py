"""Results written in place, and how many bytes a chunk's graph takes at its peak."""
