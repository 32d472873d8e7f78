"""Progress bars and lines, with the remaining time of a stage."""

import pytest

from vexport.cli.base import Display


class Clock:
    """Reports to a display at times that the test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("vexport.cli.base.time.monotonic", lambda: self.seconds)
        self.display = Display(has_bars=False)

    def at(self, seconds: float, stage: str, done: int, total: int) -> None:
        """Report a stage at this time."""
        self.seconds = seconds
        self.display(stage, done, total)


def test_lines_of_a_resumed_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work of an earlier call is no speed, and lines are at least 15 seconds apart."""
    clock = Clock(monkeypatch)
    for seconds, done in ((0, 50), (10, 55), (20, 60), (50, 100), (60, 100)):
        clock.at(seconds, "quantize", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["quantize ...", "quantize: 60 of 100, 80 s left", "quantize: done in 50.0 s"]


def test_lines_of_details(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    for seconds, stage in ((0, "load"), (1, "load: now a"), (2, "load: now a"), (3, "load: now b")):
        clock.at(seconds, stage, 0, 2)
    clock.at(4, "load: now b", 2, 2)
    clock.at(5, "resumed", 1, 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "load ...",
        "load a, 0 of 2",
        "load b, 0 of 2",
        "load: done in 4.0 s",
        "resumed",
    ]


def test_bar_of_a_repeated_stage_begins_again() -> None:
    """Each checkpoint of a command has the same stages."""
    display = Display(has_bars=True)
    shown = []
    try:
        for done in (0, 3, 6, 0, 3):
            display("round weights (layers)", done, 6)
            shown.append(display.progress.tasks[0].completed)
    finally:
        display.pause()
    assert shown == [0, 3, 6, 0, 3]
