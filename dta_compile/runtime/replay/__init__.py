"""CUDA graphs of chunks: recorded once per size, replayed for every chunk of that size.

A chunk of few tokens keeps a GPU busy for less time than its operators take to launch. A recorded graph launches as
one, but reads and writes the memory that it was recorded with. So small chunks are padded to one of a few sizes; inputs
are copied to where the graph reads them, and results from where it leaves them; the stack and the accumulators stay
where they are from step to step; and where a chunk hangs on the stack is read from device memory (`ChunkTable`).

One call of a model at a time can have them, from its forward to the end of its backward: others run without.
"""
