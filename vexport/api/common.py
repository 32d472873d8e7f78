"""What functions have in common: names of checkpoints, and how notes and problems are passed on."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from vexport.errors import VexportError

Name = str | Path
# Called with a note on what was assumed or left out.
OnNote = Callable[[str], None]
# Called with the error of an input that cannot be used, while the others are.
OnProblem = Callable[[VexportError], None]
_NO_VERIFY = "VEXPORT_NO_VERIFY"
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def python_warning(text: str) -> None:
    """Show a note as a Python warning. The command line prints notes on stderr instead."""
    warnings.warn(text, stacklevel=2)


def is_verifying() -> bool:
    """Return whether vLLM's loaders may be started to verify: unless VEXPORT_NO_VERIFY is set."""
    return os.environ.get(_NO_VERIFY, "").lower() in _FALSE
