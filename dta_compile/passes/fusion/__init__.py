"""Generated code for what lies between matrix products and attention."""
