"""One call of an executable: its masks, rows and plan, and the executor that runs its schedule."""
