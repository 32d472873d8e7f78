"""Keywords of observers, checked: what is unknown or out of range is a ValueError that says what is known."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from vexport.observers.args import OptionValue
from vexport.observers.search import Search

# "float32" computes everything in float32; "reference" repeats llm-compressor 0.14.0.1 on the CPU to the bit.
NUMERICS = ("float32", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every observer understands."""

    numerics: str = NUMERICS[0]

    def __post_init__(self) -> None:
        """ValueError for unknown numerics."""
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics: got {self.numerics!r}, need one of {', '.join(NUMERICS)}")


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

    def __post_init__(self) -> None:
        """ValueError, all at once, for values out of range."""
        super(SearchOptions, self).__post_init__()
        rules = (
            ("maxshrink", 0 <= self.maxshrink <= 1, "0 to 1"),
            ("patience", self.patience >= 0, "0 or more"),
            ("grid", self.grid > 0, "more than 0"),
            ("norm", math.isfinite(self.norm) and self.norm > 0, "a finite positive number"),
            ("expand", self.expand >= 1, "1 or more"),
        )
        broken = [f"{name}: got {getattr(self, name)}, need {need}" for name, ok, need in rules if not ok]
        if broken:
            raise ValueError("; ".join(broken))

    def search(self, steps: int) -> Search:
        """The search over the first `steps` candidates."""
        factors = tuple(1 - step / self.grid for step in range(steps))
        return Search(factors=factors, expand=self.expand, norm=self.norm, patience=self.patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSearchOptions(SearchOptions):
    """A search whose results are averaged."""

    averaging_constant: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceOptions(SearchOptions):
    """A search weighted by importance; `strict` makes a missing importance an error."""

    strict: bool = False


OptionsT = TypeVar("OptionsT", bound=Options)


def read_options(defaults: OptionsT, given: Mapping[str, OptionValue], where: str) -> OptionsT:
    """`defaults` with the given values. Raises ValueError for unknown names, wrong types and bad values."""
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{where}: got unknown keyword {', '.join(unknown)}, need one of {', '.join(known)}")
    wrong = [name for name, value in given.items() if not _fits(value, known[name])]
    if wrong:
        texts = [f"{name}={given[name]!r} (need a {type(known[name]).__name__})" for name in wrong]
        raise ValueError(f"{where}: got {', '.join(texts)}")
    try:
        return replace(defaults, **given)  # type: ignore[arg-type]  # names and types are checked above
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _fits(value: OptionValue, default: OptionValue) -> bool:
    if isinstance(default, bool | str) or isinstance(value, bool | str):
        return type(value) is type(default)
    return True
