"""Metrics that the user chooses for the verdict: METRIC[:higher|:lower][,FILTER]."""

import re
from collections.abc import Mapping
from typing import NamedTuple

Choice = Mapping[str, str]
"""Task or group (or `*` for every task that has the metric) -> METRIC[:higher|:lower][,FILTER]."""
CHOSEN_METRIC_NEED = "METRIC[:higher|:lower][,FILTER], such as acc or wer:lower"
_DIRECTION = re.compile(r":(higher|lower)(?=,|$)")


class ChosenMetric(NamedTuple):
    """A metric that the user chose for the verdict.

    `label` is METRIC or METRIC,FILTER. `higher_is_better` is None if the user stated no direction.
    """

    label: str
    higher_is_better: bool | None

    @property
    def metric(self) -> str:
        """The metric without its filter."""
        return self.label.partition(",")[0]


def parse_chosen_metric(text: str) -> ChosenMetric:
    """Parse METRIC[:higher|:lower][,FILTER].

    Raises:
        ValueError: If there is no metric.
    """
    stated = _DIRECTION.search(text)
    label = text if stated is None else text[: stated.start()] + text[stated.end() :]
    chosen = ChosenMetric(label, None if stated is None else stated[1] == "higher")
    if not chosen.metric:
        raise ValueError(CHOSEN_METRIC_NEED)
    return chosen


def direction_name(higher_is_better: bool) -> str:
    """Return `higher` or `lower`, as in METRIC:lower."""
    return "higher" if higher_is_better else "lower"
