"""The command line: one file a theme; `main` is the console script, `entry` has the commands."""

import os
import sys
from typing import NoReturn

INTERRUPTED = "Interrupted. Run the same command again to resume"


def main() -> None:
    """The console script."""
    try:
        open_closed_streams()
        from vexport.cli.interrupts import run_to_exit

        run_to_exit()
    except KeyboardInterrupt:  # before the handlers stand, or when the command has ended
        end(INTERRUPTED, 130)


def end(error: str, code: int) -> NoReturn:
    """End the process with a line on stderr, whatever state it is in."""
    os.write(2, f"error: {error}\n".encode())
    os._exit(code)


def open_closed_streams() -> None:
    """Point what a caller closed of stdin, stdout and stderr to nowhere.

    Otherwise the first files that are opened get their numbers, and what C code prints goes into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115, PTH123
