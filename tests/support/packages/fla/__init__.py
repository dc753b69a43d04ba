"""A stand-in for the package flash-linear-attention, whose kernels need a GPU: the functions that are called of it."""
