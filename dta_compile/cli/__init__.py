"""The command `dta`."""

from dta_compile.cli.command import main

__all__ = ["main"]
