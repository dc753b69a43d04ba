"""Find the mixer layers of a program, and derive and classify the masks of attention."""
