"""Encoders of images and other media, which run before the tree, and tables of what the caller gives in their place."""
