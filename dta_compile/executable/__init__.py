"""The compiled artefact that the passes hand to the runtime: plain data, which can be pickled."""
