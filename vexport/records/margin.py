"""Acceptable losses: points for shares of correct responses, relative for all other metrics.

For example, a perplexity may rise by 1 %, or a BLEU score may fall by 1 %. A difference in nats is
the logarithm of a ratio of perplexities, so a margin of 1 % is log(1.01) nats. For metrics in other
units, a margin of 1 % is a hundredth of the baseline's value.

This module has the rule: how a margin is written, which metrics it fits, its amount in the unit of
a difference, and the comparison with an interval. `scale.py` shows margins.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from vexport.records.values import Outcome

MarginValue = float | str
MarginSetting = MarginValue | Mapping[str, MarginValue] | None
"""A margin for all tasks, or margins by task (`*` for all others). None is the default."""
EVERY_TASK = "*"
DEFAULT_MARGIN = 0.02
"""Acceptable loss of a share: 2 points."""
DEFAULT_RELATIVE_MARGIN = 0.01
"""Acceptable loss of a metric that is not a share, relative to the baseline's value."""
MARGIN_NEED = "a loss from 0 to below 1 (0.02 is 2 points), or P% of the baseline's value (1%)"
Unit = Literal["share", "nats", "nats per word", "nats per byte", "bits per byte", "metric"]
"""The unit of differences of a metric.

It is a share from 0 to 1, nats (log-likelihoods and the logarithms of perplexities), bits per byte,
or the metric's unit.
"""
_NATS = ("nats", "nats per word", "nats per byte")
_RELATIVE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Margin:
    """An acceptable loss.

    `value` is a share of the baseline's value if `is_relative`. Otherwise it is a difference of two
    shares of correct responses, for example 0.02 for 2 points.
    """

    value: float
    is_relative: bool = False

    @property
    def setting(self) -> MarginValue:
        """The margin as a value of `--margin`: 0.02, or `1%`."""
        return f"{100 * self.value:.12g}%" if self.is_relative else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:.6g}%" if self.is_relative else f"{self.value:g}"

    def fits(self, *, is_share: bool) -> bool:
        """Return True if a metric that is a share, or is not, can have this margin."""
        return self.is_relative != is_share

    def amount(self, unit: Unit, baseline: float) -> float:
        """Return the margin in the unit of a difference. `baseline` is the baseline's value."""
        if not self.is_relative:
            return self.value
        return math.log1p(self.value) if unit in _NATS else self.value * abs(baseline)


_DEFAULTS = (Margin(DEFAULT_MARGIN), Margin(DEFAULT_RELATIVE_MARGIN, True))


def parse_margin(value: object) -> Margin:
    """Return the margin of a number such as 0.02, or of a text such as `2%`.

    Raises:
        ValueError: If the value is neither, or is out of range.
    """
    if isinstance(value, str):
        relative = _RELATIVE.fullmatch(value)
        try:
            margin = Margin(float(relative[1]) / 100, True) if relative else Margin(float(value))
        except ValueError:
            raise ValueError(MARGIN_NEED) from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        margin = Margin(float(value))
    else:
        raise ValueError(MARGIN_NEED)
    if not math.isfinite(margin.value) or not 0 <= margin.value < 1:
        raise ValueError(MARGIN_NEED)
    return margin


@dataclass(frozen=True, slots=True)
class Margins:
    """The given margins by task. The margin for all other tasks is under `*`."""

    by_task: Mapping[str, Margin]

    @classmethod
    def read(cls, setting: MarginSetting) -> "Margins":
        """Return the margins of a setting. Raise ValueError if a margin is not valid."""
        if setting is None:
            return cls({})
        given = setting if isinstance(setting, Mapping) else {EVERY_TASK: setting}
        return cls({task: parse_margin(value) for task, value in given.items()})

    def given(self, task: str) -> Margin | None:
        """Return the margin that was given for a task, or None for the default."""
        return self.by_task.get(task, self.by_task.get(EVERY_TASK))

    def of(self, task: str, unit: Unit) -> Margin:
        """Return the margin of a metric of a task.

        The first margin that fits the metric applies: the task's, the margin for all tasks, or a
        default.
        """
        given = (self.by_task.get(task), self.by_task.get(EVERY_TASK), *_DEFAULTS)
        is_share = unit == "share"
        return next(each for each in given if each is not None and each.fits(is_share=is_share))

    def only(self, tasks: Collection[str]) -> "Margins":
        """Return the margins of these tasks, and the margin for all tasks."""
        names = {EVERY_TASK, *tasks}
        return Margins({name: each for name, each in self.by_task.items() if name in names})

    def to_store(self, units: Mapping[str, Unit]) -> MarginValue | dict[str, MarginValue]:
        """Return the margins of these tasks as a setting: one value if they are all equal."""
        margins = {task: self.of(task, unit).setting for task, unit in units.items()}
        values = [*dict.fromkeys(margins.values())]
        return values[0] if len(values) == 1 else margins


def margin_of_shares(setting: MarginSetting) -> float:
    """Return the acceptable loss of tasks that are scored in shares and have no own margin."""
    return Margins.read(setting).of(EVERY_TASK, "share").value


def outcome_of(low: float, high: float, margin: float) -> Outcome:
    """Compare an interval of a difference with the margin.

    The outcome is PASS if the whole interval is above -margin, and FAIL if it is below.
    """
    return "PASS" if low > -margin else "FAIL" if high < -margin else "INCONCLUSIVE"
