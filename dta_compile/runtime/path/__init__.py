"""The path stack: states of mixers (KV, running states) along one root-to-leaf path, read and written by chunks."""
