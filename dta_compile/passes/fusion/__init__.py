"""Generated code for operators between matrix products and attention, and fewer calls of the host."""
