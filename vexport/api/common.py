"""Shared types and helpers of the API's functions: names, notes and problems."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vexport.errors import InputError, VexportError
from vexport.names import ModelRef, SourceRef, parse_model, parse_source
from vexport.rules import usage

T = TypeVar("T")
R = TypeVar("R")
Name = str | Path
# A name of a model, or a name that is already parsed.
ModelName = Name | ModelRef
# Called with a note on an assumption or an omission.
OnNote = Callable[[str], None]
# Called with the error of an input that cannot be used. The remaining inputs are still processed.
OnProblem = Callable[[VexportError], None]
_NO_VERIFY = "VEXPORT_NO_VERIFY"
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def parsed(where: str, parse: Callable[[T], R], value: T) -> R:
    """Return `parse(value)`. Raises InputError if the value is wrong.

    The command line uses the same parsers.
    """
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise InputError.of(usage.ARGUMENT, where, reason=error) from None


def named(where: str, value: object) -> str:
    """Return a name or a path as text. Raises InputError for any other value."""
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(name, str):
        raise InputError.of(usage.NAME, where, value=value)
    return name


def source_ref(where: str, value: ModelName) -> SourceRef:
    """Parse the name of a checkpoint. Raises InputError for a value of another type."""
    return value if isinstance(value, SourceRef) else parse_source(named(where, value))


def model_ref(where: str, value: ModelName) -> ModelRef:
    """Parse the name of a model to evaluate. Raises InputError for a value of another type."""
    return value if isinstance(value, ModelRef) else parse_model(named(where, value))


def python_warning(text: str) -> None:
    """Show a note as a Python warning. The command line prints notes on stderr instead."""
    warnings.warn(text, stacklevel=2)


def is_verifying() -> bool:
    """Return True unless VEXPORT_NO_VERIFY forbids starting vLLM's loaders to verify."""
    return os.environ.get(_NO_VERIFY, "").lower() in _FALSE
