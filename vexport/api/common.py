"""Shared types and helpers of the API's functions: names, notes and problems."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from vexport.errors import VexportError

Name = str | Path
# Called with a note on an assumption or an omission.
OnNote = Callable[[str], None]
# Called with the error of an input that cannot be used. The remaining inputs are still processed.
OnProblem = Callable[[VexportError], None]
_NO_VERIFY = "VEXPORT_NO_VERIFY"
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def python_warning(text: str) -> None:
    """Show a note as a Python warning. The command line prints notes on stderr instead."""
    warnings.warn(text, stacklevel=2)


def is_verifying() -> bool:
    """Return True unless VEXPORT_NO_VERIFY forbids starting vLLM's loaders to verify."""
    return os.environ.get(_NO_VERIFY, "").lower() in _FALSE
