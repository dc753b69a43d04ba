"""Memory of the executable graphs: results written in place, and the bytes that each graph allocates at its peak."""
