"""Analysed programs kept in files, so that another process skips the passes.

A file holds what the passes made of one captured graph, and the description of all that they read (`description`). It
is used where the description is the same text, and the guards that the passes left hold and are made again
(`assumptions`). What has no description that two processes could compare is analysed anew.
"""
