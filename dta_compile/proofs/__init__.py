"""Proofs of the class of attention masks, from terms and facts alone, with their assumptions on inputs."""
