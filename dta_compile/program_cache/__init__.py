"""Cache of executables in files, so that another process skips the passes.

A file holds the executable of one captured graph, and a hash of the text that describes all inputs of the passes
(`key`). It is used if the description is the same, and the guards that the passes added hold and are added
again (`size_guards`). A graph that has no description which two processes could compare runs through the passes.
"""
