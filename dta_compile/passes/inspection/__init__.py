"""Services of `run_passes` between passes: invariants of a program, and its listing as text."""
