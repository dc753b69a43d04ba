"""What the runner does between passes: the invariants that it checks, and a program as text."""
