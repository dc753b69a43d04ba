"""Record CUDA graphs of small chunks once per size, and replay them for every chunk of that size.

The kernels of a small chunk take longer to launch than to run. A CUDA graph is launched at once, but reads and writes
the addresses that it was recorded with. So small chunks are padded to a few sizes; inputs are copied to fixed buffers,
and results out of them; the path stack and the accumulators have fixed addresses (the arena); and the position of a
chunk on the stack is read from device memory (`ChunkTable`).

One call of a model at a time leases the arena, from its forward to the end of its backward; others run without graphs.
"""
