"""Share and remaining time of a stage, from the times of its reports."""

import pytest

from vexport.cli.base import BarDisplay, PlainDisplay
from vexport.records.pace import Pace
from vexport.records.values import COMPILATION, SECONDS


def test_first_report_counts_only_while_alone() -> None:
    pace = Pace(begun=100.0)
    assert pace.seconds_left(100.0, 0, 10) is None
    assert pace.seconds_left(130.0, 1, 10) == 9 * 30
    assert pace.seconds_left(132.0, 2, 10) == 8 * 2
    assert pace.seconds_left(140.0, 6, 10) == 4 * 2
    assert pace.seconds_left(150.0, 10, 10) == 0


def test_work_of_an_earlier_call_is_no_speed() -> None:
    pace = Pace(begun=0.0, done_at_begin=50)
    assert pace.seconds_left(5.0, 50, 100) is None
    assert pace.seconds_left(10.0, 60, 100) == 40


def test_pauses_are_no_work() -> None:
    pace = Pace(begun=0.0)
    pace.pause(20.0)
    assert pace.seconds_left(30.0, 1, 3) == 2 * 10
    pace.pause(100.0)
    assert pace.seconds_left(135.0, 2, 3) == 5


def test_more_pause_than_time_is_no_negative_speed() -> None:
    pace = Pace(begun=0.0)
    pace.pause(20.0)
    assert pace.seconds_left(5.0, 1, 3) == 0


def test_share_never_decreases() -> None:
    pace = Pace(begun=0.0)
    shares = [
        pace.share(done, total) for done, total in ((0, 10), (4, 10), (4, 20), (3, 10), (9, 10))
    ]
    assert shares == [0, 0.4, 0.4, 0.4, 0.9]
    assert pace.share(12, 10) == 1
    assert Pace(begun=0.0).share(0, 0) == 0


class Clock:
    """Reports to a display at times that the test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("vexport.cli.base.time.monotonic", lambda: self.seconds)
        self.display = PlainDisplay()

    def at(self, seconds: float, stage: str, done: int, total: int) -> None:
        """Report a stage at this time."""
        self.seconds = seconds
        self.display(stage, done, total)


def test_display_excludes_only_compilation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20 s for the first part, 16 s are compilation. A later compilation counts, too."""
    clock = Clock(monkeypatch)
    clock.at(0, "quantize", 0, 10)
    clock.at(2, COMPILATION, 0, 1)
    clock.at(20, COMPILATION, 16, 16)
    clock.at(20, "quantize", 1, 10)
    assert "quantize: 1 of 10, 36 s left" in capsys.readouterr().err
    clock.at(60, COMPILATION, 46, 46)
    clock.at(60, "quantize", 2, 10)
    assert "quantize: 2 of 10, 80 s left" in capsys.readouterr().err


def test_displayed_share_never_decreases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    stage = f"calibrate{SECONDS}"
    clock.at(0, stage, 0, 1)
    clock.at(20, stage, 20, 100)
    clock.at(40, stage, 40, 400)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["calibrate: 20%, 80 s left", "calibrate: 20%, 360 s left"]


def test_bar_of_a_repeated_stage_begins_again() -> None:
    """Each checkpoint of a command has the same stages."""
    display = BarDisplay()
    shown = []
    try:
        for done in (0, 3, 6, 0, 3):
            display("round weights (layers)", done, 6)
            shown.append(display.bars.tasks[0].completed)
    finally:
        display.pause()
    assert shown == [0, 3, 6, 0, 3]
