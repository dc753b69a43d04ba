"""The prefix tree of a batch, and how it is cut into chunks."""
