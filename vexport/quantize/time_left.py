"""Report the progress of all calibration steps together, and the remaining seconds.

Every step reports its finished layers. The remaining time of the step follows from the speed so
far. The time of later steps is estimated from the same speed. Work that happens only once, such as
the compilation of kernels, does not count as speed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vexport.records import OnProgress
from vexport.records.calibration import CALIBRATE, GRADIENTS, ROUND
from vexport.records.values import PROGRESS_STEP, SECONDS

OVERALL = f"calibrate{SECONDS}"
# The assumed time of a token in each step, in passes through a layer. Looking back takes a forward,
# a second forward and a backward. Calibrating takes a forward. Rounding takes a forward of the
# source and of the quantized model, and the moments of the inputs. The numbers are used only for
# steps that have not started: a running step is measured.
COST = {GRADIENTS: 3.0, CALIBRATE: 1.0, ROUND: 3.0}
# What each step does at the moment. Gradients take several passes through a layer.
WORDS: Mapping[str, str] = {
    GRADIENTS: "measuring gradients, pass",
    CALIBRATE: "measuring the inputs of layer",
    ROUND: "rounding layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of calibration: the name of its progress, and the number of tokens that it runs."""

    name: str
    tokens: int

    @property
    def work(self) -> float:
        """Return the expected time of the step, in a unit that all steps share."""
        return self.tokens * COST[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Number of layers that a step has done at a time, without the time for compilations."""

    at: float
    done: int


class OverallProgress:
    """Report the seconds of all steps together in one stage, with the current layer of the step.

    The steps run in the given order. Steps that an earlier call has finished are not reported. They
    are left out when a later step starts. `compiling_seconds` returns the seconds that the
    compilation of kernels has taken.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        on_progress: OnProgress,
        compiling_seconds: Callable[[], float] = float,
    ) -> None:
        self._steps = {step.name: step for step in steps}
        self._names = list(self._steps)
        self._on_progress = on_progress
        self._compiling_seconds = compiling_seconds
        self._begun: float | None = None
        # The points at which each step began, and finished its first layer.
        self._started = dict[str, _Point]()
        self._after_first = dict[str, _Point]()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report a step of calibration as part of all steps. Other stages are passed on."""
        if stage not in self._steps:
            self._on_progress(stage, done, total)
            return
        now = time.monotonic()
        point = _Point(at=now - self._compiling_seconds(), done=done)
        self._started.setdefault(stage, point)
        if self._begun is None:
            self._begun = now
            self._on_progress(OVERALL, 0, 1)
        if done:
            self._report(stage, point, total, now - self._begun)

    def _report(self, stage: str, point: _Point, total: int, elapsed: float) -> None:
        """Report the overall progress after at least one layer of the current step."""
        number = self._names.index(stage)
        seconds_per_layer = self._seconds_per_layer(stage, point)
        left_of_step = seconds_per_layer * (total - point.done)
        left_after_step = sum(
            seconds_per_layer * total * self._steps[name].work / self._steps[stage].work
            for name in self._names[number + 1 :]
        )
        is_end = point.done == total and number == len(self._names) - 1
        # At least a second, because a share of zero seconds is not defined.
        done = max(1, round(elapsed))
        expected = max(done + 1, round(elapsed + left_of_step + left_after_step))
        layer = min(point.done + 1, total)
        words = f"{WORDS[stage]} {layer:,} of {total:,}"
        self._on_progress(f"{OVERALL}{PROGRESS_STEP}{words}", done, done if is_end else expected)

    def _seconds_per_layer(self, stage: str, point: _Point) -> float:
        """Return the mean seconds of a layer, without the first layer if another is done.

        The first layer includes work that is done only once, such as loading compiled kernels.
        """
        first = self._after_first.setdefault(stage, point)
        begun = self._started[stage] if first.done == point.done else first
        return (point.at - begun.at) / max(point.done - begun.done, 1)
