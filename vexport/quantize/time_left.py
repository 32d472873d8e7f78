"""Report the progress of all calibration steps together, and the remaining seconds.

Every step reports its finished layers. The remaining time of the step follows from the speed so
far. The time of later steps follows from the same speed and the expected work of the steps. Work
that happens only once, such as the compilation of kernels, does not count as speed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vexport.records import OnProgress
from vexport.records.calibration import CALIBRATE, GRADIENTS, ROUND
from vexport.records.pace import Pace
from vexport.records.values import PROGRESS_STEP, SECONDS

OVERALL = f"calibrate{SECONDS}"
# Time of a backward pass through a layer, in units of a forward pass. It runs the layer forward
# once more and then backward. The pass through the head also runs forward and backward.
BACKWARD = 3.0
# Words for the current work of each step. Gradients take several passes through a layer.
WORDS: Mapping[str, str] = {
    GRADIENTS: "measuring gradients, pass",
    CALIBRATE: "measuring the inputs of layer",
    ROUND: "rounding layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of calibration: the name of its progress, and its expected work.

    The unit of `work` is the same for all steps. It matters only for steps that have not begun: a
    running step is measured.
    """

    name: str
    work: float

    def share(self, done: int, total: int) -> float:
        """Return the share of the work after `done` of `total` passes through layers.

        The first half of the passes for gradients goes forward, and the second half backward.
        """
        if self.name != GRADIENTS:
            return done / total
        forward = total // 2
        return _passes(done, forward) / _passes(total, forward)


def _passes(done: int, forward: int) -> float:
    """Return the time of the first `done` passes, in units of a forward pass.

    `forward` is the number of forward passes, which come first.
    """
    return min(done, forward) + BACKWARD * max(done - forward, 0)


class OverallProgress:
    """Report the seconds of all steps together in one stage, with the current layer of the step.

    The steps run in the given order. Steps that an earlier call has finished are not reported, and
    do not count as remaining time. `compiling_seconds` returns the seconds that the compilation of
    kernels has taken. The share of the seconds that are done never decreases.
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
        self._whole: Pace | None = None
        self._paces = dict[str, Pace]()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report a step of calibration as part of all steps. Other stages are passed on."""
        if stage not in self._steps:
            self._on_progress(stage, done, total)
            return
        now = time.monotonic()
        working = now - self._compiling_seconds()
        share = self._steps[stage].share(done, total)
        self._paces.setdefault(stage, Pace(begun=working, done_at_begin=share))
        if self._whole is None:
            self._whole = Pace(begun=now)
            self._on_progress(OVERALL, 0, 1)
        if done:
            elapsed = now - self._whole.begun
            left = self._seconds_left(stage, working, share)
            is_end = done == total and stage == self._names[-1]
            layer = min(done + 1, total)
            words = f"{WORDS[stage]} {layer:,} of {total:,}"
            seconds = self._seconds(self._whole, elapsed, left, is_end=is_end)
            self._on_progress(f"{OVERALL}{PROGRESS_STEP}{words}", *seconds)

    def _seconds_left(self, stage: str, working: float, share: float) -> float:
        """Return the expected seconds until the end of the last step."""
        of_step = self._paces[stage].seconds_per_unit(working, share) or 0.0
        work = self._steps[stage].work
        later = self._names[self._names.index(stage) + 1 :]
        # The speed of a step without counted work says nothing about later steps.
        of_later = sum(of_step * self._steps[name].work / work for name in later) if work else 0.0
        return of_step * (1 - share) + of_later

    def _seconds(
        self, whole: Pace, elapsed: float, left: float, *, is_end: bool
    ) -> tuple[int, int]:
        """Return the finished and the expected seconds, in a ratio that never decreases.

        If the expected remaining time grows, both numbers are increased, so that their ratio stays
        the same. Both are at least 1, because a share of zero seconds is not defined.
        """
        if is_end:
            done = max(1, round(elapsed))
            return done, done
        left = max(left, 1.0)
        share = whole.share(elapsed, elapsed + left)
        total = max(elapsed + left, left / (1 - share))
        done = max(1, round(share * total))
        return done, max(done + 1, round(total))
