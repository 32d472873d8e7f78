"""Shared by all commands: the answer in colour, progress on stderr, and exit codes from
findings.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from vexport.cli.options import HeadedOption, SectionedCommand, answer_file
from vexport.errors import CheckpointFailed, EnvironmentFault, Inconclusive, InputError
from vexport.records import (
    ENGINE_CHECK,
    PROGRESS_DETAIL,
    CheckReport,
    DryLoadReport,
    Finding,
    LoadReport,
    OnProgress,
    silent,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vexport.formats.plan import Plan

# Words that are coloured at the start of a line, or in a column, of a text report.
_SHADES = {
    "PASS": "green",
    "FAIL": "red",
    "FAILS": "red",
    "FAULTY": "red",
    "REFUSED": "red",
    "NO ANSWER": "yellow",
    "INCONCLUSIVE": "yellow",
    "error": "red",
    "warning": "yellow",
    "info": "cyan",
}
_STATUS = r"PASS|FAILS?|INCONCLUSIVE|REFUSED|FAULTY|NO ANSWER"
_MARKS = re.compile(
    rf"^(?P<head>{_STATUS}|error|warning|info)(?=  | on |:|$)|(?<=  )(?P<cell>{_STATUS})(?=  | "
    rf"\w|$)",
    re.MULTILINE,
)


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` gets colour: a terminal does, NO_COLOR turns it off and FORCE_COLOR
    on.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (
        stream.isatty() and os.environ.get("TERM") != "dumb"
    )


def coloured(text: str) -> str:
    """`text` with its statuses and severities in colour."""
    return _MARKS.sub(lambda mark: click.style(mark[0], fg=_SHADES[mark[0]], bold=True), text)


EXIT_CODES = "Exit codes: see `vexport --help`."
# Formats that people read, so that stderr needs no summary.
_READ = ("text", "github", "markdown")


def note(text: str) -> None:
    """A line on stderr about what the answer on stdout does not say."""
    click.echo(f"note: {text}", err=True)


def command(
    name: str | None = None, *, no_args_is_help: bool = False, unlisted: Sequence[str] = ()
) -> Callable[[Callable[..., None]], click.Command]:
    """A command named `name`, or like its function, with --quiet and --debug.

    Help leaves out the options that are `unlisted`; they work.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated = click.command(
            name, cls=SectionedCommand, epilog=EXIT_CODES, no_args_is_help=no_args_is_help
        )(function)
        for parameter in decorated.params:
            if isinstance(parameter, click.Option) and parameter.name in unlisted:
                parameter.hidden = True
        decorated.params += [
            HeadedOption(
                ["-q", "--quiet"], heading="Output", is_flag=True, help="No progress on stderr."
            ),
            HeadedOption(
                ["-v", "--verbose"],
                heading="Output",
                is_flag=True,
                expose_value=False,
                help="More of it on stderr.",
            ),
            HeadedOption(
                ["--debug"],
                heading="Output",
                is_flag=True,
                expose_value=False,
                help="Show tracebacks.",
            ),
        ]
        return decorated

    return decorate


def print_text(text: str) -> None:
    """The answer of a command: on stdout, in colour on a terminal, or in the file of --output."""
    from vexport.files import errors_at, write_text

    context = click.get_current_context()
    file = answer_file(context)
    if file is None:
        colour = context.params.get("format_") == "text" and wants_colour(sys.stdout)
        with errors_at("standard output"):
            click.echo(coloured(text) if colour else text, nl=not text.endswith("\n"), color=colour)
        return
    whole = text if text.endswith("\n") else f"{text}\n"
    if (
        file.exists() and not file.is_file()
    ):  # /dev/stdout, /dev/null and pipes are written to, not replaced
        with errors_at(str(file)), file.open("w", encoding="utf-8") as stream:
            stream.write(whole)
        return
    write_text(file, whole)


def add_step_summary(markdown: str) -> None:
    """Append to the summary of the step of GitHub Actions that runs this; nothing elsewhere."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        from vexport.files import errors_at

        with errors_at(path), Path(path).open("a", encoding="utf-8") as stream:
            stream.write(markdown)


def add_text_summary(text: str) -> None:
    """Append an answer for people, as it is shown in a terminal, to the summary of the step."""
    add_step_summary("```text\n" + text.replace("```", "'''").rstrip("\n") + "\n```\n")


def is_read() -> bool:
    """Return whether stdout has the answer in a form for people, so that stderr need not repeat
    it.
    """
    context = click.get_current_context(silent=True)
    return (
        context is not None
        and context.params.get("format_") in _READ
        and answer_file(context) is None
    )


def require_ok(checkpoint: str, ok: bool, findings: Sequence[Finding]) -> None:
    """Exit with 1 where a checkpoint has an error finding, naming the first."""
    if ok:
        return
    errors = [finding for finding in findings if finding.severity == "error"]
    first, number = errors[0].brief, len(errors)
    if is_read():
        counted = "1 error" if number == 1 else f"{number:,} errors, the first"
        got = f"it fails with {counted} at {first.where} ({first.check}), shown above"
        raise CheckpointFailed(checkpoint, got=got, need="", fix="")
    where, fix = f"{checkpoint}: {first.where}", f"{first.fix}{_more(number)}"
    raise CheckpointFailed(where, got=first.got, need=first.expected, fix=fix)


def _more(number: int) -> str:
    return f" ({number - 1:,} more)" if number > 1 else ""


def require_judged(reports: Sequence[CheckReport]) -> None:
    """Exit with 3 where something of a checkpoint was not judged, naming the first."""
    for report in reports:
        if report.not_judged:
            first, more = report.not_judged[0].brief, _more(len(report.not_judged))
            got = f"not judged, which --strict asks for: {first.what}{more}: {first.why}"
            fix = "load it where vLLM runs (`vexport load`), or leave --strict out"
            raise Inconclusive(report.checkpoint, got=got, need="", fix=fix)


def require_no(check: str, reports: Sequence[CheckReport | LoadReport | DryLoadReport]) -> None:
    """Exit with 4 at a finding of this check: an exception of ours, or an engine that died."""
    for finding in (finding for report in reports for finding in report.findings):
        if finding.check == check:
            raise EnvironmentFault(
                finding.where, got=finding.got, need=finding.expected, fix=finding.fix
            )


def require_plan(source: str, plan: "Plan") -> None:
    """Exit with 2 where a plan has refusals, naming the first unless it has been read."""
    from vexport.plan.build import require_accepted

    if plan.refusals and is_read():
        number = len(plan.refusals)
        counted = "1 refusal" if number == 1 else f"{number:,} refusals"
        got = f"vLLM could not run what this plan makes: {counted}, shown above"
        raise InputError(source, got=got, need="", fix="")
    require_accepted(plan)


def require_loaded(reports: Sequence[LoadReport | DryLoadReport]) -> None:
    """Exit with 1 where a checkpoint fails, else with 4 where an engine died before it could
    tell.
    """
    for report in reports:
        of_checkpoint = [finding for finding in report.findings if finding.check != ENGINE_CHECK]
        require_ok(report.checkpoint, report.ok or not of_checkpoint, of_checkpoint)
    require_no(ENGINE_CHECK, reports)


def conclude(outcome: str, name: str, reason: str, *, fix: str = "") -> None:
    """Exit with 1 for FAIL and 3 for INCONCLUSIVE. `fix` replaces the usual advice."""
    why = "" if is_read() else f": {reason}"
    if outcome == "FAIL":
        fix = fix or "see the report; keep the worst layers or choose a scheme with more bits"
        raise CheckpointFailed(name, got=f"FAIL{why}", need="", fix=fix)
    if outcome == "INCONCLUSIVE":
        fix = fix or (
            "the report says what would settle it" if why else "see what would settle it above"
        )
        raise Inconclusive(name, got=f"INCONCLUSIVE{why}", need="", fix=fix)


LINE_EVERY_SECONDS = 15.0


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[OnProgress]:
    """Yield the function that stages report to: it shows bars on a terminal, else a line now and
    then.
    """
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        yield silent
        return
    if not sys.stderr.isatty():
        # Not rich's own answer: FORCE_COLOR, which CI sets, asks for colour and not for bars that
        # move.
        yield PlainDisplay()
        return
    display = BarDisplay()
    try:
        yield display
    finally:
        if display.bars.tasks:
            display.bars.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """The time of a stage's first report, and how much of the stage was done at that time."""

    at: float
    done: int

    def seconds_left(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds until the end at the mean speed so far, or None before the first step.

        The speed is the mean of the whole stage, because single layers differ.
        """
        new = done - self.done
        return (now - self.at) / new * (total - done) if new > 0 else None


class BarDisplay:
    """One bar for each stage, with the time that it has taken and the time that is left."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self.bars: Progress = progress.Progress(
            progress.SpinnerColumn(finished_text="✓"),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, _Begun] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Update the stage's bar and its detail."""
        name, now = stage.partition(PROGRESS_DETAIL)[0], time.monotonic()
        total = max(total, 1)
        self.bars.start()
        if name not in self._tasks:
            self._tasks[name] = self.bars.add_task("", total=total, left="")
            self._begun[name] = _Begun(at=now, done=done)
        left = self._begun[name].seconds_left(now, done, total)
        self.bars.update(
            self._tasks[name],
            description=_whole(stage),
            completed=min(done, total),
            total=total,
            left=f"{timedelta(seconds=round(left))} left" if left else "",
        )


class PlainDisplay:
    """A line when a stage starts, at most every fifteen seconds with the time left, and when it
    ends.

    The detail of a stage (PROGRESS_DETAIL) is printed when it changes.
    """

    def __init__(self) -> None:
        self._begun: dict[str, _Begun] = {}
        self._printed: dict[str, float] = {}
        self._shown: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Print the progress of the stage, if it is due."""
        now, name = time.monotonic(), stage.partition(PROGRESS_DETAIL)[0]
        is_first, is_end = name not in self._begun, done >= total
        begun = self._begun.setdefault(name, _Begun(at=now, done=done))
        if name in self._shown:  # it has ended
            return
        left = begun.seconds_left(now, done, total)
        progress = f"{done} of {total}" + (f", {left:.0f} s left" if left else "")
        if is_first and is_end:  # an event without a duration
            line = _whole(stage)
        elif stage != name and stage not in self._shown:
            line, is_end = f"{_whole(stage)}, {progress}", False
        elif is_end:
            line = f"{name}: done in {now - begun.at:.1f} s"
        elif is_first:
            line = f"{name} ..."
        elif now - self._printed[name] >= LINE_EVERY_SECONDS:
            line = f"{name}: {progress}"
        else:
            return
        self._printed[name] = now
        self._shown |= {name, stage} if is_end else {stage} - {name}
        print(line, file=sys.stderr, flush=True)


def _whole(stage: str) -> str:
    """A stage's name with its detail."""
    return stage.replace(PROGRESS_DETAIL, " ")
