"""The command line: one file a theme; `interrupts.main` is the console script, `entry` has the commands."""

import os

try:
    from vexport.cli.interrupts import main
except KeyboardInterrupt:  # before its handlers are in place
    os.write(2, b"error: Interrupted. Run the same command again\n")
    os._exit(130)

__all__ = ["main"]
