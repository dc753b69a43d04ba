"""One call of a compiled program: its masks, rows and plan, and the executor that runs its schedule."""
