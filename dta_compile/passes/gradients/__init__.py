"""Forward and backward of a chunk: stages, their joint graphs, the partition at saved values, and accumulation."""
