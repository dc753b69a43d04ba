"""Attention over a chunk's tree on CPUs, in C++ that is compiled on the user's machine."""
