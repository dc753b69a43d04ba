"""The path stack: what mixers keep of the tokens of one root-to-leaf path, and how a chunk reads and writes it."""
