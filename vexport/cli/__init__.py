"""The command line: one file a theme; `main` is the console script, `entry` has the commands."""

import os

INTERRUPTED = "Interrupted. Run the same command again"


def main() -> None:
    """The console script."""
    try:
        from vexport.cli.interrupts import run_to_exit

        run_to_exit()
    except KeyboardInterrupt:  # before its handlers are in place
        os.write(2, f"error: {INTERRUPTED}\n".encode())
        os._exit(130)
