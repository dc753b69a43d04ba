"""Command line interface: the command `dta`."""

from dta_compile.cli.command import main

__all__ = ["main"]
