"""The command line: one file a theme; `entry.main` is the console script."""

from vexport.cli.entry import main

__all__ = ["main"]
