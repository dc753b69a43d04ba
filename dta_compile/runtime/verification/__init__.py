"""Compare calls with the captured program: a few rows by default, or whole calls."""
