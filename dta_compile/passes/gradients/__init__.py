"""Forward and backward of a chunk: what is saved between them, and where gradients are added up."""
