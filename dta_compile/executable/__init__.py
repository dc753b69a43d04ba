"""The compiled artefact: what the passes hand to the runtime, as plain data that pickles as it is."""
