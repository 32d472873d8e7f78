"""The estimate of calibration's remaining seconds, over all steps."""

from collections.abc import Sequence

import pytest

from vexport.cli.base import progress_display
from vexport.quantize.time_left import OVERALL, OverallProgress, Step
from vexport.records.calibration import GRADIENTS, ROUND

STEPS = (Step(name=GRADIENTS, work=1000), Step(name=ROUND, work=4000))


class Recorded:
    """Progress reports of all steps and of single steps, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: Sequence[Step] = STEPS) -> None:
        self.seconds = 100.0
        self.compiling = 0.0
        self.overall = list[tuple[int, int]]()
        self.others = list[tuple[str, int, int]]()
        self.words = ""
        monkeypatch.setattr("vexport.quantize.time_left.time.monotonic", lambda: self.seconds)
        self.progress = OverallProgress(steps, self._take, lambda: self.compiling)

    def _take(self, stage: str, done: int, total: int) -> None:
        if stage.startswith(OVERALL):
            self.overall.append((done, total))
            self.words = stage.removeprefix(OVERALL)
        else:
            self.others.append((stage, done, total))

    def after(self, seconds: float, stage: str, done: int, total: int) -> None:
        """Report a stage this number of seconds after the last report."""
        self.seconds += seconds
        self.progress(stage, done, total)


def test_seconds_left_follow_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head and each of four backward passes take as long as three of the forward passes."""
    recorded = Recorded(monkeypatch)
    recorded.after(0, GRADIENTS, 0, 9)
    recorded.after(5, GRADIENTS, 1, 9)
    gradients = 5 * (4 + 3 * 5)
    assert recorded.overall == [(0, 1), (5, gradients + 4 * gradients)]


def test_step_without_counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the step's own time is left: its speed says nothing about the later step."""
    steps = (Step(name=GRADIENTS, work=0), Step(name=ROUND, work=4000))
    recorded = Recorded(monkeypatch, steps)
    recorded.after(0, GRADIENTS, 0, 9)
    recorded.after(5, GRADIENTS, 1, 9)
    assert recorded.overall == [(0, 1), (5, 5 * (4 + 3 * 5))]


def test_share_never_decreases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes back and layers take longer than expected."""
    recorded = Recorded(monkeypatch)
    recorded.after(0, GRADIENTS, 0, 9)
    for done in range(1, 10):
        recorded.after(1 if done <= 4 else 20, GRADIENTS, done, 9)
    recorded.after(0, ROUND, 0, 8)
    for done in range(1, 9):
        recorded.after(50 * done, ROUND, done, 8)
    shares = [done / total for done, total in recorded.overall]
    rounding = 0.005  # seconds are whole numbers
    assert all(now >= before - rounding for before, now in zip(shares, shares[1:], strict=False))
    assert shares[-1] == 1
    assert max(shares[:-1]) < 1


def test_more_time_left_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    recorded.after(0, ROUND, 0, 4)
    recorded.after(10, ROUND, 1, 4)
    recorded.after(100, ROUND, 2, 4)
    before, after = (total - done for done, total in recorded.overall[1:])
    assert (before, after) == (30, 200)


def test_last_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's seconds per token no longer count."""
    recorded = Recorded(monkeypatch)
    recorded.after(0, GRADIENTS, 0, 10)
    recorded.after(20, GRADIENTS, 10, 10)
    recorded.after(0, ROUND, 0, 5)
    recorded.after(60, ROUND, 1, 5)
    assert recorded.overall[-1] == (80, 20 + 5 * 60)
    recorded.after(200, ROUND, 5, 5)
    assert recorded.overall[-1] == (280, 280)
    assert all(done < total for done, total in recorded.overall[:-1])


def test_finished_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    recorded.after(0, "quantize (bytes)", 3, 7)
    recorded.after(30, ROUND, 0, 5)
    recorded.after(10, ROUND, 1, 5)
    assert recorded.overall == [(0, 1), (10, 50)]
    assert ("quantize (bytes)", 3, 7) in recorded.others
    assert recorded.words.endswith("rounding layer 2 of 5")
    assert len(recorded.others) == 1


def test_work_done_once_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling does not count. The first layer does not count once a second layer is done."""
    recorded = Recorded(monkeypatch)
    recorded.after(0, ROUND, 0, 11)
    recorded.compiling = 300
    recorded.after(320, ROUND, 1, 11)
    assert recorded.overall[-1] == (320, 320 + 10 * 20)
    recorded.after(10, ROUND, 2, 11)
    assert recorded.overall[-1] == (330, 330 + 9 * 10)


def test_steps_of_no_time_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All layers of a tiny model take less than half a second."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with progress_display(quiet=False) as show:
        progress = OverallProgress(STEPS, show)
        for step in STEPS:
            progress(step.name, 0, 1)
            progress(step.name, 1, 1)
    assert "calibrate: done in 0.0 s" in capsys.readouterr().err
