"""Predict time and memory of a training step from a model configuration, without the model or a GPU."""
