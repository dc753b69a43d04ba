"""Execution of planned schedules: the path stack, attention, the executor, and the autograd function around them."""
