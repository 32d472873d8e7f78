"""The command line: one file a theme; `main` is the console script, `entry` has the commands."""

import os
from typing import NoReturn

# The logger of progress, which a log has and a terminal shows otherwise.
PROGRESS = "vexport.progress"
INTERRUPTED = "Interrupted. Run the same command again to resume"


def main() -> None:
    """The console script."""
    try:
        from vexport.cli.interrupts import run_to_exit

        run_to_exit()
    except KeyboardInterrupt:  # before the handlers stand, or when the command has ended
        end(INTERRUPTED, 130)


def end(error: str, code: int) -> NoReturn:
    """End the process with a line on stderr, whatever state it is in."""
    os.write(2, f"error: {error}\n".encode())
    os._exit(code)
