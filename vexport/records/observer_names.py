"""Observers by name, with their options, without torch. `vexport.observers` loads the classes.

To add an observer, see `vexport.observers`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

OptionValue = bool | int | float | str
# For each option: a function that accepts valid values, and a description of them.
_NEEDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "maxshrink": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "patience": (lambda value: value >= 0, "a number of at least 0"),
    "grid": (lambda value: math.isfinite(value) and value > 0, "a finite positive number"),
    "norm": (lambda value: math.isfinite(value) and value > 0, "a finite positive number"),
    "expand": (lambda value: math.isfinite(value) and value >= 1, "a finite number of at least 1"),
    "averaging_constant": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of options, used as it is for observers without options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(Options):
    """Weight of a new observation in a moving average. 1.0 turns averaging off."""

    averaging_constant: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(Options):
    """Search for a range by shrinking it step by step.

    The first range is the min-max range times `expand`. No range is smaller than `1 - maxshrink`
    times the first range. The step is `1 / grid`. The error is the sum of `|error| ** norm`. The
    search ends after `patience` steps that improved no group; 0 turns that off.
    """

    maxshrink: float = 0.20
    patience: int = 5
    grid: float = 100.0
    norm: float = 2.4
    expand: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSearchOptions(SearchOptions):
    """Options of a search with averaged results."""

    averaging_constant: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceOptions(SearchOptions):
    """Options of a search weighted by importance.

    `strict` turns a missing importance into an error.
    """

    strict: bool = False


SEARCH = SearchOptions()
# From llm-compressor 0.14, observers/mse.py and imatrix.py.
NVFP4_EXPANDED_SEARCH = SearchOptions(
    expand=1.8, maxshrink=1 - 0.8 / 1.8, grid=200.0, patience=1000
)
IMPORTANCE_SEARCH = ImportanceOptions(maxshrink=0.95, patience=5, grid=20.0, norm=3.0)
# These differ from llm-compressor's values. docs/observers.md has the reason.
NVFP4_EXPANDED_IMPORTANCE = replace(IMPORTANCE_SEARCH, expand=1.5, maxshrink=1 - 0.5 / 1.5)
OptionsT = TypeVar("OptionsT", bound=Options)


def option_problems(defaults: Options, given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (option, expected value) for each option that is unknown or has an invalid value."""
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    for name, value in given.items():
        default = known.get(name)
        if default is None:
            yield (
                name,
                f"one of {', '.join(known)}"
                if known
                else "no keywords, because this observer has none",
            )
        elif (
            isinstance(default, bool)
            or isinstance(value, bool)
            or not isinstance(value, int | float)
        ):
            if type(value) is not type(default):
                yield name, "true or false" if isinstance(default, bool) else "a number"
        elif isinstance(default, int) and not float(value).is_integer():
            yield name, "a whole number"
        else:
            holds, need = _NEEDS[name]
            if not holds(value):
                yield name, need


def read_options(defaults: OptionsT, given: Mapping[str, OptionValue], where: str) -> OptionsT:
    """Return `defaults` with the given values.

    Raises:
        ValueError: For all problems that `option_problems` finds.
    """
    problems = [
        f"{name}: got {given[name]!r}, need {need}"
        for name, need in option_problems(defaults, given)
    ]
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return replace(defaults, **given)  # names and types are checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverName:
    """An observer: its class, the first sentence of its docstring, and its options."""

    kind: str
    summary: str
    options: Options = Options()
    aliases: tuple[str, ...] = ()


OBSERVERS: Mapping[str, ObserverName] = {
    "memoryless_minmax": ObserverName(
        kind="MemorylessMinMaxObserver", summary="Range of the last observed tensor"
    ),
    "static_minmax": ObserverName(
        kind="StaticMinMaxObserver",
        summary="Running minimum and maximum over all observed tensors",
    ),
    "minmax": ObserverName(
        kind="MinMaxObserver",
        summary="Moving average of minimum and maximum, `old * (1 - c) + new * c`",
        options=AverageOptions(),
    ),
    "memoryless_mse": ObserverName(
        kind="MemorylessMSEObserver",
        summary="Range with the smallest quantization error for the last tensor",
        options=SEARCH,
    ),
    "mse": ObserverName(
        kind="MovingAverageMSEObserver",
        summary="Moving average of the ranges with the smallest quantization error",
        options=AverageSearchOptions(),
    ),
    "imatrix_mse": ObserverName(
        kind="IMatrixMSEObserver",
        summary="Smallest quantization error, weighted by the mean square of each input channel",
        options=IMPORTANCE_SEARCH,
    ),
    "nvfp4_expanded_mse": ObserverName(
        kind="NVFP4ExpandedMSEObserver",
        summary="NVFP4 search by error between 1.8 and 0.8 times the range",
        options=NVFP4_EXPANDED_SEARCH,
        aliases=("fouroversix",),
    ),
    "nvfp4_expanded_imatrix": ObserverName(
        kind="NVFP4ExpandedIMatrixObserver",
        summary="NVFP4 search by importance between 1.5 and 0.5 times the range",
        options=NVFP4_EXPANDED_IMPORTANCE,
    ),
}
# A weight is observed once, so all of these give its min-max range.
MIN_MAX = ("memoryless_minmax", "static_minmax", "minmax")
# Searches that need calibration. The second search is used to round NVFP4 weights.
BY_IMPORTANCE = (IMPORTANCE := "imatrix_mse", EXPANDED := "nvfp4_expanded_imatrix")
# The same search without input statistics.
UNWEIGHTED = "memoryless_mse"
# Separator in `package.module:Class`, an observer from another package.
CLASS_SEPARATOR = ":"


def folded(name: str) -> str:
    """Return the name in lower case, with `_` for `-` and spaces.

    compressed-tensors' registry treats names in the same way.
    """
    return name.lower().replace("-", "_").replace(" ", "_")


def observer_name(name: str) -> str:
    """Return the registry name for a name or an alias. Return other names unchanged."""
    spelled = {
        alias: known for known, each in OBSERVERS.items() for alias in (known, *each.aliases)
    }
    return spelled.get(folded(name), name)
