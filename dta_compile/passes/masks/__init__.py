"""The attention layers, and proofs of what their masks allow."""
