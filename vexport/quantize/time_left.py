"""Report the progress of all calibration steps together, and the remaining seconds.

Every step reports its finished layers. The remaining time of the step follows from the speed so
far. The time of later steps is estimated from the same speed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vexport.records import PROGRESS_DETAIL, OnProgress
from vexport.records.calibration import CALIBRATE, GRADIENTS, ROUND

OVERALL = "calibrate (seconds)"
# The assumed time of a token in each step, in passes through a layer. Looking back takes a forward,
# a second forward and a backward. Calibrating takes a forward. Rounding takes a forward of the
# source and of the quantized model, and the moments of the inputs. The numbers are used only for
# steps that have not started: a running step is measured.
COST = {GRADIENTS: 3.0, CALIBRATE: 1.0, ROUND: 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of calibration: the name of its progress, and the number of tokens that it runs."""

    name: str
    tokens: int

    @property
    def work(self) -> float:
        """Return the expected time of the step, in a unit that all steps share."""
        return self.tokens * COST[self.name]


class OverallProgress:
    """Report the seconds of all steps together, next to the progress of each step.

    The steps run in the given order. Steps that an earlier call has finished are not reported. They
    are left out when a later step starts.
    """

    def __init__(self, steps: Sequence[Step], on_progress: OnProgress) -> None:
        self._steps = {step.name: step for step in steps}
        self._names = list(self._steps)
        self._on_progress = on_progress
        self._started = dict[str, float]()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report the progress of a step, and of all steps. Other stages are passed on."""
        if stage in self._steps:
            now = time.monotonic()
            is_first = not self._started
            self._started.setdefault(stage, now)
            if is_first:
                self._on_progress(OVERALL, 0, 1)
            elif done:
                self._report(stage, done / total, now)
        self._on_progress(stage, done, total)

    def _report(self, stage: str, share: float, now: float) -> None:
        """Report the overall progress after a `share` (above 0) of the current step."""
        number = self._names.index(stage)
        elapsed = now - min(self._started.values())
        seconds_of_step = (now - self._started[stage]) / share
        left_of_step = seconds_of_step * (1 - share)
        left_after_step = sum(
            seconds_of_step * self._steps[name].work / self._steps[stage].work
            for name in self._names[number + 1 :]
        )
        done = round(elapsed)
        is_end = share == 1 and number == len(self._names) - 1
        total = done if is_end else max(done + 1, round(elapsed + left_of_step + left_after_step))
        detail = f"step {number + 1} of {len(self._names)}"
        self._on_progress(f"{OVERALL}{PROGRESS_DETAIL}{detail}", done, total)
