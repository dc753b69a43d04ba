"""The comparison of calls with the captured program: on a few rows by default, or as a whole."""
