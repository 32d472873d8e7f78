"""The command line: one file a theme; `interrupts.main` is the console script, `entry` has the commands."""

from vexport.cli.interrupts import main

__all__ = ["main"]
