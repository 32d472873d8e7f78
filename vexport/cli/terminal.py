"""Progress on stderr: bars with time left on a terminal, a line now and then elsewhere, nothing if quiet."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vexport.cli import PROGRESS
from vexport.records import PROGRESS_DETAIL, OnProgress, silent

LINE_EVERY_SECONDS = 15.0
# Time left is by the mean speed since the start: a layer can take longer than what rich looks back at.
ALL_OF_IT_SECONDS = 1e6


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[OnProgress]:
    """Yield the function that stages report to, for as long as the display stands."""
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        yield _logged(silent)
        return
    if not sys.stderr.isatty():
        # Not rich's own answer: FORCE_COLOR, which CI sets, asks for colour and not for bars that move.
        yield _logged(PlainDisplay())
        return
    bars = _bars(Console(stderr=True))
    try:
        yield _logged(BarDisplay(bars))
    finally:
        if bars.tasks:
            bars.stop()


def _logged(display: OnProgress) -> OnProgress:
    """The display, and a line in the log where a stage starts and ends."""
    seen, log = set[str](), logging.getLogger(PROGRESS)

    def report(stage: str, done: int, total: int) -> None:
        for event in (f"{stage} ...", f"{stage}: done" if done >= total else ""):
            if event and event not in seen:
                seen.add(event)
                log.debug(event)
        display(stage, done, total)

    return report


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=ALL_OF_IT_SECONDS,
    )


class BarDisplay:
    """One bar for each stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Move the stage's bar, and say what is true of it now."""
        name = stage.partition(PROGRESS_DETAIL)[0]
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(_whole(stage), total=max(total, 1))
        self._bars.update(
            self._tasks[name],
            description=_whole(stage),
            completed=min(done, max(total, 1)),
            total=max(total, 1),
        )


class PlainDisplay:
    """A line when a stage starts, at most every fifteen seconds with the time left, and when it ends.

    What is true of a stage at a moment (PROGRESS_DETAIL) is a line when it changes.
    """

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._printed: dict[str, float] = {}
        self._told: set[str] = set()
        self._ended: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Print where the stage is, if it is time to."""
        now, name = time.monotonic(), stage.partition(PROGRESS_DETAIL)[0]
        is_first, started = name not in self._started, self._started.setdefault(name, now)
        if name in self._ended:
            return
        if is_first and done >= total:  # what is told, not done
            self._ended.add(name)
            self._print(_whole(stage))
            return
        if stage not in self._told and stage != name:
            self._told.add(stage)
            self._printed[name] = now
            self._print(f"{_whole(stage)}, {done} of {total}")
        elif done >= total:
            self._ended.add(name)
            self._print(f"{name}: done in {now - started:.1f} s")
        elif name not in self._printed:
            self._printed[name] = now
            self._print(f"{name} ...")
        elif now - self._printed[name] >= LINE_EVERY_SECONDS:
            self._printed[name] = now
            left = f", {(now - started) / done * (total - done):.0f} s left" if done else ""
            self._print(f"{name}: {done} of {total}{left}")

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _whole(stage: str) -> str:
    """A stage's name with what is true of it now."""
    return stage.replace(PROGRESS_DETAIL, " ")
