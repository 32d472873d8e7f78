"""Share and remaining time of a stage, computed from the times of its progress reports.

This module only computes: callers pass the time, so the numbers can be tested without waiting.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Pace:
    """Speed of a stage that begins at `begun` with `done_at_begin` of its work done.

    Work is in any unit, such as files or layers. The speed is the mean speed of the whole stage,
    because parts differ in duration. The first report counts only while it is the only report: it
    includes work that is done only once, such as loading compiled kernels. Times are in seconds.
    """

    begun: float
    done_at_begin: float = 0.0
    _paused: float = field(default=0.0, init=False)
    _share: float = field(default=0.0, init=False)
    # First report after the begin: its time minus all pauses, and the work that was done by then.
    _first: tuple[float, float] | None = field(default=None, init=False)

    def pause(self, seconds: float) -> None:
        """Exclude a time without work from the speed, such as the compilation of kernels."""
        self._paused += seconds

    def seconds_per_unit(self, now: float, done: float) -> float | None:
        """Return the seconds for one unit of work, or None before any work is done."""
        if done <= self.done_at_begin:
            return None
        working = now - self._paused
        if self._first is None:
            self._first = working, done
        since, done_before = self._first
        if done <= done_before:
            since, done_before = self.begun, self.done_at_begin
        return max(working - since, 0.0) / (done - done_before)

    def seconds_left(self, now: float, done: float, total: float) -> float | None:
        """Return the estimated seconds until the end, or None before any work is done."""
        seconds = self.seconds_per_unit(now, done)
        return None if seconds is None else seconds * max(total - done, 0.0)

    @property
    def is_complete(self) -> bool:
        """True once all of the stage's work was reported as done."""
        return self._share >= 1.0

    def share(self, done: float, total: float) -> float:
        """Return the share of the stage that is done.

        It never decreases, even if a later report has less work done or a larger total.
        """
        self._share = max(self._share, min(done / total, 1.0) if total > 0 else 0.0)
        return self._share
