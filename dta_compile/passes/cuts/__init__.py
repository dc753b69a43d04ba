"""The graph cut in prologue, trunk, head and epilogue, and what each of them takes and returns."""
