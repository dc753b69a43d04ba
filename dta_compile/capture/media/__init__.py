"""Encoders of images and other media, and given embeddings, cut out of captured graphs to run before the tree."""
