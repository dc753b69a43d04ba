"""Values that have several rows for every token: of its heads, its experts, or the streams of a model."""
