"""What compiling hands over to running: frozen plain data, which pickles as it is."""
