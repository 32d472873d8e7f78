"""The observers by name with their keywords, without torch; `vexport.observers` loads the classes.

Adding an observer is a class in `vexport/observers` and one entry here.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

OptionValue = bool | int | float | str
# Valid search options: a predicate for each, and its description.
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
    """A search from `expand` times the range down to `1 - maxshrink` of that, in steps of `1 /
    grid`.

    The error is the sum of `|error| ** norm`; the search ends after `patience` steps that improved
    no group, 0 turns that off.
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
NVFP4_EXPANDED_SEARCH = SearchOptions(
    expand=1.8, maxshrink=1 - 0.8 / 1.8, grid=200.0, patience=1000
)
IMPORTANCE_SEARCH = ImportanceOptions(maxshrink=0.95, patience=5, grid=20.0, norm=3.0)
# vexport's own; docs/observers.md says why they are not the peer's.
NVFP4_EXPANDED_IMPORTANCE = replace(IMPORTANCE_SEARCH, expand=1.5, maxshrink=1 - 0.5 / 1.5)
OptionsT = TypeVar("OptionsT", bound=Options)


def option_problems(defaults: Options, given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(keyword, what is needed in its place) of each that is unknown or has a value that cannot
    be.
    """
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    for name, value in given.items():
        default = known.get(name)
        if default is None:
            yield (
                name,
                f"one of {', '.join(known)}" if known else "no keyword: this observer has none",
            )
        elif (
            isinstance(default, bool)
            or isinstance(value, bool)
            or not isinstance(value, int | float)
        ):
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
        f"{name}: got {given[name]!r}, need {need}"
        for name, need in option_problems(defaults, given)
    ]
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return replace(defaults, **given)  # names and types are checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverName:
    """The class of an observer, the first sentence of its docstring, its keywords, and the file it
    is in.
    """

    kind: str
    summary: str
    options: Options = Options()
    aliases: tuple[str, ...] = ()
    file: str = "ranges"


OBSERVERS: Mapping[str, ObserverName] = {
    "memoryless_minmax": ObserverName(
        kind="MemorylessMinMaxObserver", summary="The range of the last tensor observed"
    ),
    "static_minmax": ObserverName(
        kind="StaticMinMaxObserver",
        summary="The running minimum and maximum over all tensors observed",
    ),
    "minmax": ObserverName(
        kind="MinMaxObserver",
        summary="A moving average of minimum and maximum, `old * (1 - c) + new * c`",
        options=AverageOptions(),
    ),
    "memoryless_mse": ObserverName(
        kind="MemorylessMSEObserver",
        summary="The range of the last tensor that has the least quantization error",
        options=SEARCH,
    ),
    "mse": ObserverName(
        kind="MovingAverageMSEObserver",
        summary="A moving average of the ranges with the least quantization error",
        options=AverageSearchOptions(),
    ),
    "imatrix_mse": ObserverName(
        kind="IMatrixMSEObserver",
        summary="Least quantization error weighted by the mean square of each input channel",
        options=IMPORTANCE_SEARCH,
    ),
    "nvfp4_expanded_mse": ObserverName(
        kind="NVFP4ExpandedMSEObserver",
        summary="Least quantization error between 1.8 and 0.8 times the range, for NVFP4",
        options=NVFP4_EXPANDED_SEARCH,
        aliases=("fouroversix",),
    ),
    "nvfp4_expanded_imatrix": ObserverName(
        kind="NVFP4ExpandedIMatrixObserver",
        summary="The same search between 1.5 and 0.5 times the range, for NVFP4",
        options=NVFP4_EXPANDED_IMPORTANCE,
    ),
}
# A weight is observed once, so all of these give its min-max range.
MIN_MAX = ("memoryless_minmax", "static_minmax", "minmax")
# Searches that need calibration; the second is used to round NVFP4 weights.
BY_IMPORTANCE = (IMPORTANCE := "imatrix_mse", EXPANDED := "nvfp4_expanded_imatrix")
# The same search without input statistics.
UNWEIGHTED = "memoryless_mse"
# The separator in `package.module:Class`, an observer of another package.
CLASS_SEPARATOR = ":"


def folded(name: str) -> str:
    """A name as it is looked up: in any case, `-` and spaces as `_`; as compressed-tensors'
    registry.
    """
    return name.lower().replace("-", "_").replace(" ", "_")


def observer_name(name: str) -> str:
    """The registry name that `name` or an alias spells; the text itself where it is none of
    vexport's.
    """
    spelled = {
        alias: known for known, each in OBSERVERS.items() for alias in (known, *each.aliases)
    }
    return spelled.get(folded(name), name)
