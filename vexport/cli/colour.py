"""Colour for a terminal: statuses and severities in what is printed as text; none in files and pipes."""

import os
import re
from typing import TextIO

import click

# What a line of a text report begins with, or a column of it holds: vexport.reports.text and matrix.
_SHADES = {
    "PASS": "green",
    "FAIL": "red",
    "FAILS": "red",
    "FAULTY": "red",
    "REFUSED": "red",
    "NO ANSWER": "yellow",
    "INCONCLUSIVE": "yellow",
    "error": "red",
    "warning": "yellow",
    "info": "cyan",
}
_STATUS = r"PASS|FAILS?|INCONCLUSIVE|REFUSED|FAULTY|NO ANSWER"
_MARKS = re.compile(
    rf"^(?P<head>{_STATUS}|error|warning|info)(?=  | on |:|$)|(?<=  )(?P<cell>{_STATUS})(?=  | \w|$)",
    re.MULTILINE,
)
_OFF = ("", "0")


def wants_colour(stream: TextIO) -> bool:
    """Whether `stream` gets colour.

    NO_COLOR turns it off (no-color.org), FORCE_COLOR or CLICOLOR_FORCE on, CLICOLOR=0 off; else a terminal
    that is not `dumb` has it.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "") not in _OFF for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    if os.environ.get("CLICOLOR") == "0" or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def coloured(text: str) -> str:
    """`text` with its statuses and severities in colour."""
    return _MARKS.sub(lambda mark: click.style(mark[0], fg=_SHADES[mark[0]], bold=True), text)
