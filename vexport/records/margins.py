"""Acceptable losses: points for shares of correct responses, relative for all other metrics."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

MarginValue = float | str
MarginSetting = MarginValue | Mapping[str, MarginValue] | None
"""A margin for all tasks, or margins by task (`*` for all others). None is the default."""
EVERY_TASK = "*"
DEFAULT_MARGIN = 0.02
"""Acceptable loss of a share: 2 points."""
DEFAULT_RELATIVE_MARGIN = 0.01
"""Acceptable loss of a metric that is not a share, relative to the baseline's value."""
MARGIN_NEED = "a loss from 0 to below 1 (0.02 is 2 points), or P% of the baseline's value (1%)"
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


def margins_by_task(setting: MarginSetting) -> dict[str, Margin]:
    """Return the given margins by task. The margin for all other tasks is under `*`."""
    if setting is None:
        return {}
    given = setting if isinstance(setting, Mapping) else {EVERY_TASK: setting}
    return {task: parse_margin(value) for task, value in given.items()}


def margin_of_shares(setting: MarginSetting) -> float:
    """Return the acceptable loss of tasks that are scored in shares and have no own margin."""
    given = margins_by_task(setting).get(EVERY_TASK)
    return DEFAULT_MARGIN if given is None or given.is_relative else given.value
