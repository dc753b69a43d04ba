"""Runtimes of recurrent layers: from the state above a chunk to the states at chosen depths of its spine."""
