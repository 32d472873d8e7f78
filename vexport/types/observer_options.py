"""Keywords of observers, checked without torch: what is unknown or out of range, and what is known."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

OptionValue = bool | int | float | str
# The values of the search that can be: what must hold of each, in words too.
_NEEDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "maxshrink": (lambda value: 0 <= value <= 1, "0 to 1"),
    "patience": (lambda value: value >= 0, "0 or more"),
    "grid": (lambda value: math.isfinite(value) and value > 0, "a finite positive number"),
    "norm": (lambda value: math.isfinite(value) and value > 0, "a finite positive number"),
    "expand": (lambda value: math.isfinite(value) and value >= 1, "1 or more"),
    "averaging_constant": (lambda value: 0 < value <= 1, "more than 0, up to 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keywords of an observer that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(Options):
    """The weight of a new observation in a moving average; 1.0 turns averaging off."""

    averaging_constant: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(Options):
    """A search from `expand` times the range down to `1 - maxshrink` of that, in steps of `1 / grid`.

    The error is the sum of `|error| ** norm`; the search ends after `patience` steps that improved no
    group, 0 turns that off.
    """

    maxshrink: float = 0.20
    patience: int = 5
    grid: float = 100.0
    norm: float = 2.4
    expand: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSearchOptions(SearchOptions):
    """A search whose results are averaged."""

    averaging_constant: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceOptions(SearchOptions):
    """A search weighted by importance; `strict` makes a missing importance an error."""

    strict: bool = False


SEARCH = SearchOptions()
# llm-compressor 0.14, observers/mse.py and imatrix.py.
NVFP4_EXPANDED_SEARCH = SearchOptions(expand=1.8, maxshrink=1 - 0.8 / 1.8, grid=200.0, patience=1000)
IMPORTANCE_SEARCH = ImportanceOptions(maxshrink=0.95, patience=5, grid=20.0, norm=3.0)
# vexport's own; docs/observers.md says why they are not the peer's.
NVFP4_EXPANDED_IMPORTANCE = replace(IMPORTANCE_SEARCH, expand=1.5, maxshrink=1 - 0.5 / 1.5)
OptionsT = TypeVar("OptionsT", bound=Options)


def option_problems(defaults: Options, given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(keyword, what is needed in its place) of each that is unknown or has a value that cannot be."""
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    for name, value in given.items():
        default = known.get(name)
        if default is None:
            yield name, f"one of {', '.join(known)}" if known else "no keyword: this observer has none"
        elif isinstance(default, bool) or isinstance(value, bool) or not isinstance(value, int | float):
            if type(value) is not type(default):
                yield name, f"a {'boolean' if isinstance(default, bool) else 'number'}"
        elif isinstance(default, int) and not float(value).is_integer():
            yield name, "a whole number"
        else:
            holds, need = _NEEDS[name]
            if not holds(value):
                yield name, need


def read_options(defaults: OptionsT, given: Mapping[str, OptionValue], where: str) -> OptionsT:
    """`defaults` with the given values. Raises ValueError for all that `option_problems` finds."""
    problems = [
        f"{name}: got {given[name]!r}, need {need}" for name, need in option_problems(defaults, given)
    ]
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return replace(defaults, **given)  # names and types are checked above
