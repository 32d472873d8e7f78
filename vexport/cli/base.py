"""Shared code of all commands: coloured output, progress on stderr, exit codes from findings."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from vexport.cli.options import HeadedOption, SectionedCommand, output_file
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
from vexport.records.values import join_limited
from vexport.rules import conclusion as rules
from vexport.rules import serving

if TYPE_CHECKING:
    from rich.progress import Task, TaskID

    from vexport.formats.plan import Plan

# Words that get a colour at the start of a line or in a column of a text report.
_SHADES = {
    "PASS": "green",
    "FAIL": "red",
    "FAILS": "red",
    "FAULTY": "red",
    "REFUSED": "red",
    "DIFFERS": "red",
    "NO ANSWER": "yellow",
    "NOT JUDGED": "yellow",
    "INCONCLUSIVE": "yellow",
    "error": "red",
    "warning": "yellow",
    "info": "cyan",
}
_STATUS = r"PASS|FAILS?|INCONCLUSIVE|REFUSED|DIFFERS|FAULTY|NO ANSWER|NOT JUDGED"
_MARKS = re.compile(
    rf"^(?P<head>{_STATUS}|error|warning|info)(?=  | on | of |:|$)"
    rf"|(?<=  )(?P<cell>{_STATUS})(?=  | \w|$)",
    re.MULTILINE,
)


def wants_colour(stream: TextIO) -> bool:
    """Return True if output to `stream` is coloured.

    Terminals get colour, except TERM=dumb. NO_COLOR turns colour off everywhere, FORCE_COLOR turns
    it on. NO_COLOR wins if both are set.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (
        stream.isatty() and os.environ.get("TERM") != "dumb"
    )


def coloured(text: str) -> str:
    """Return `text` with statuses and severities in colour."""
    return _MARKS.sub(lambda mark: click.style(mark[0], fg=_SHADES[mark[0]], bold=True), text)


EXIT_CODES = "Exit codes: see `vexport --help`."
# Formats that people read. If the output on stdout has such a format, errors do not repeat it.
# `::error::` at the beginning of a line (GitHub ignores spaces), and `##[error]` anywhere.
_CI_COMMAND = re.compile(r"(^[^\S\n]*):(?=:)|#(?=#\w*\[)", re.MULTILINE)
# How each format writes out a character.
_SPELLINGS = {
    **dict.fromkeys(("html", "markdown", "junit"), "&#{};"),
    "json": "\\u{:04x}",
    "text": "\\x{:02x}",
}
_READABLE_FORMATS = ("text", "github", "markdown")


def note(text: str) -> None:
    """Print a note on stderr. Notes are not part of a command's output."""
    click.echo(f"note: {text}", err=True)


def command(
    name: str | None = None, *, no_args_is_help: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that makes a command with --quiet, --verbose and --debug.

    The command has the name `name`, or its function's name by default.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated = click.command(
            name, cls=SectionedCommand, epilog=EXIT_CODES, no_args_is_help=no_args_is_help
        )(function)
        decorated.params += [
            HeadedOption(
                ["-q", "--quiet"],
                heading="Output",
                is_flag=True,
                help="Do not show progress on stderr.",
            ),
            HeadedOption(
                ["-v", "--verbose"],
                heading="Output",
                is_flag=True,
                expose_value=False,
                help="Show more messages on stderr.",
            ),
            HeadedOption(
                ["--debug"],
                heading="Output",
                is_flag=True,
                expose_value=False,
                help="Show the traceback of an error.",
            ),
        ]
        return decorated

    return decorate


def print_text(text: str) -> None:
    """Write a command's output to stdout, in colour on a terminal, or to the file of --output."""
    from vexport.files import errors_at, write_text

    context = click.get_current_context()
    file, format_ = output_file(context), context.params.get("format_")
    text = _without_ci_commands(text, format_)
    if file is None:
        colour = format_ == "text" and wants_colour(sys.stdout)
        with errors_at("standard output"):
            click.echo(coloured(text) if colour else text, nl=not text.endswith("\n"), color=colour)
        return
    whole = text if text.endswith("\n") else f"{text}\n"
    if (
        file.exists() and not file.is_file()
    ):  # write into /dev/stdout, /dev/null and pipes instead of replacing them
        with errors_at(str(file)), file.open("w", encoding="utf-8") as stream:
            stream.write(whole)
        return
    write_text(file, whole)
    if not context.params.get("quiet"):
        click.echo(f"written: {file}", err=True)


def _without_ci_commands(text: str, format_: str | None) -> str:
    """Return the text with the first character of each command for a CI system written out.

    Names of tasks and prompts come from other people. Only the annotations of `--format github` are
    commands, and they escape these texts.
    """
    spelling = _SPELLINGS.get(format_ or "")
    if spelling is None:
        return text
    return _CI_COMMAND.sub(
        lambda found: f"{found[1] or ''}{spelling.format(ord(found[0][-1]))}", text
    )


def text_width(default: int | None = None) -> int:
    """Return the width of text output in columns.

    This is the terminal's width within limits. For files and pipes, it is `default`, or WIDTH.
    """
    from vexport.reports.renderers.text import MAX_WIDTH, MIN_WIDTH, WIDTH

    if output_file(click.get_current_context()) is not None or not sys.stdout.isatty():
        return default or WIDTH
    columns = shutil.get_terminal_size(fallback=(WIDTH, 24)).columns
    return min(max(columns, MIN_WIDTH), MAX_WIDTH)


def add_step_summary(markdown: str) -> None:
    """Append text to the step summary of GitHub Actions. Do nothing outside GitHub Actions."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        from vexport.files import errors_at

        with errors_at(path), Path(path).open("a", encoding="utf-8") as stream:
            stream.write(markdown)


def add_text_summary(text: str) -> None:
    """Append output in text form to the step summary of GitHub Actions, as a code block."""
    add_step_summary("```text\n" + text.replace("```", "'''").rstrip("\n") + "\n```\n")


def is_shown_to_user() -> bool:
    """Return True if the command prints its output to stdout in a format that people read.

    In this case, errors on stderr do not repeat the output.
    """
    context = click.get_current_context(silent=True)
    return (
        context is not None
        and context.params.get("format_") in _READABLE_FORMATS
        and output_file(context) is None
    )


def require_ok(checkpoint: str, ok: bool, findings: Sequence[Finding]) -> None:
    """Raise CheckpointFailed (exit code 1) with the first error finding, unless `ok` is True."""
    if ok:
        return
    errors = [finding for finding in findings if finding.severity == "error"]
    first, number = errors[0].brief, len(errors)
    if is_shown_to_user():
        counted = "1 error" if number == 1 else f"{number:,} errors, the first"
        place = f"{first.where} ({first.rule or first.check})"
        raise CheckpointFailed.of(rules.FINDINGS, checkpoint, counted=counted, first=place)
    raise first.error(CheckpointFailed, f"{checkpoint}: {first.where}", others=number - 1)


def require_all_ok(reports: Sequence[CheckReport]) -> None:
    """Raise CheckpointFailed (exit code 1) if a checkpoint fails.

    If one checkpoint fails, the error is the same as in `require_ok`. If several fail, the error
    gives their number and names.
    """
    failing = [report for report in reports if not report.ok]
    if len(failing) > 1:
        number = f"{len(failing):,} of {len(reports):,} checkpoints"
        names = join_limited([report.checkpoint for report in failing], ", ", MOST_NAMES)
        fix = "" if is_shown_to_user() else "see their findings in the output"
        raise CheckpointFailed.of(rules.SEVERAL, number, names=names, remedy=fix)
    for report in failing:
        require_ok(report.checkpoint, report.ok, report.findings)


def require_judged(reports: Sequence[CheckReport]) -> None:
    """Raise Inconclusive (exit code 3) if a report lists something that could not be judged.

    The error is for the first report with such an entry.
    """
    for report in reports:
        if report.not_judged:
            first, others = report.not_judged[0].brief, len(report.not_judged) - 1
            what = f"{first.what} ({others:,} more)" if others else first.what
            raise Inconclusive.of(rules.NOT_JUDGED, report.checkpoint, what=what, why=first.why)


def require_no_findings_of(
    check: str, reports: Sequence[CheckReport | LoadReport | DryLoadReport]
) -> None:
    """Raise EnvironmentFault (exit code 4) if a report has a finding of this check.

    Such findings do not judge a checkpoint: they report an exception inside vexport (`internal`) or
    an engine that ended without a result.
    """
    for finding in (finding for report in reports for finding in report.findings):
        if finding.check == check:
            raise finding.error(EnvironmentFault, finding.where)


def require_plan(source: str, plan: "Plan") -> None:
    """Raise InputError (exit code 2) if a plan has refusals.

    The error contains the first refusal, unless stdout already shows the plan to a person.
    """
    from vexport.plan.build import require_accepted

    if plan.refusals and is_shown_to_user():
        raise InputError.of(rules.REFUSALS, source, count=len(plan.refusals))
    require_accepted(plan)


def require_loaded(reports: Sequence[LoadReport | DryLoadReport]) -> None:
    """Raise CheckpointFailed (exit code 1) if a checkpoint fails.

    Raise EnvironmentFault (exit code 4) if an engine ended without a result.
    """
    for report in reports:
        of_checkpoint = [finding for finding in report.findings if finding.check != ENGINE_CHECK]
        require_ok(report.checkpoint, report.ok or not of_checkpoint, of_checkpoint)
    require_no_findings_of(ENGINE_CHECK, reports)


def require_compared(report: DryLoadReport) -> None:
    """Raise Inconclusive (exit code 3) if a value of a server could not be compared."""
    if report.server is not None and report.not_judged:
        first = report.not_judged[0]
        raise Inconclusive.of(
            serving.NOT_COMPARED, report.server.log, what=first.what, why=first.why
        )


def conclude(outcome: str, name: str, reason: str, advice: str) -> None:
    """Raise CheckpointFailed (exit code 1) for FAIL, Inconclusive (exit code 3) for INCONCLUSIVE.

    Does nothing for other outcomes.
    """
    why = "" if is_shown_to_user() else f": {reason}"
    if outcome == "FAIL":
        raise CheckpointFailed.of(rules.FAIL, name, why=why, advice=advice)
    if outcome == "INCONCLUSIVE":
        raise Inconclusive.of(rules.INCONCLUSIVE, name, why=why, advice=advice)


LINE_EVERY_SECONDS = 15.0


# Maximum number of names of models in a line of progress or in an error.
MOST_NAMES = 3


@contextmanager
def progress_display(*, quiet: bool, reads: Sequence[object] = ()) -> Iterator[OnProgress]:
    """Yield a progress callback. It shows bars on a terminal, and occasional lines elsewhere.

    If `reads` has models, the display begins at once with the stage `import libraries,
    read NAMES`, which ends when the next stage begins. Import slow libraries inside the block. If
    `quiet`, the callback and downloads from the hub show nothing.
    """
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        yield silent
        return
    # Do not use rich's detection: CI sets FORCE_COLOR for colour, and rich would show bars.
    display = Display(has_bars=sys.stderr.isatty())
    if reads:
        display.begin(
            f"import libraries, read {join_limited([*map(str, reads)], ', ', MOST_NAMES)}"
        )
    try:
        yield display
        display.end_first_stage()
    finally:
        display.pause()


def pause(on_progress: OnProgress) -> None:
    """Stop updating the progress display, so that a command can print its output below it."""
    if isinstance(on_progress, Display):
        on_progress.end_first_stage()
        on_progress.pause()


class Display:
    """Progress callback that shows each stage to a person.

    On a terminal, a stage is a bar with its elapsed and remaining time. Elsewhere, a line is
    printed when a stage starts, when its detail (PROGRESS_DETAIL) changes, and when it ends. In
    between, lines are at least LINE_EVERY_SECONDS apart.
    """

    def __init__(self, *, has_bars: bool) -> None:
        from rich import progress
        from rich.console import Console

        self.progress = progress.Progress(
            progress.SpinnerColumn(finished_text="✓"),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            get_time=lambda: time.monotonic(),
            # A layer of a large model takes minutes. The default of 30 seconds would forget it.
            speed_estimate_period=24 * 3600,
            disable=not has_bars,
        )
        self._tasks: dict[str, TaskID] = {}
        self._first_stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage. If the stage of `begin` still runs, end it first."""
        self.end_first_stage()
        self._show(stage, done, total)

    def begin(self, stage: str) -> None:
        """Show a stage that lasts until another stage is reported."""
        self._show(stage, 0, 1)
        self._first_stage = stage

    def end_first_stage(self) -> None:
        """End the stage of `begin`, unless it has ended."""
        if self._first_stage:
            self._show(self._first_stage, 1, 1)
            self._first_stage = ""

    def _show(self, stage: str, done: int, total: int) -> None:
        name = stage.partition(PROGRESS_DETAIL)[0]
        title = stage.replace(PROGRESS_DETAIL, " ")
        is_first = name not in self._tasks
        if is_first:
            self._tasks[name] = self.progress.add_task(
                title, total=max(total, 1), completed=done, details={name}
            )
        number = self._tasks[name]
        task = next(task for task in self.progress.tasks if task.id == number)
        has_ended = task.finished
        if has_ended and done < total and not self.progress.disable:
            # The next checkpoint or scheme of the same command begins this stage again.
            self.progress.reset(number)
        self.progress.update(number, description=title, completed=done, total=max(total, 1))
        self.progress.start()
        if self.progress.disable and not has_ended:
            _print_line(name, task, is_first=is_first)

    def pause(self) -> None:
        """Leave the bars on the terminal as they are. The next update begins new bars below."""
        if self.progress.disable:
            return
        if self.progress.tasks:
            self.progress.stop()
        for task in self._tasks.values():
            self.progress.remove_task(task)
        self._tasks.clear()


def _print_line(name: str, task: "Task", *, is_first: bool) -> None:
    left = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
    progress = f"{task.completed} of {task.total}{left}"
    now, title, details = task.get_time(), task.description, task.fields["details"]
    if is_first and task.finished:  # an event without a duration
        line = title
    elif task.finished:
        line = f"{name}: done in {task.finished_time:.1f} s"
    elif title not in details:
        line = f"{title}, {progress}"
        details.add(title)
    elif is_first:
        line = f"{name} ..."
    elif now - task.fields["printed"] >= LINE_EVERY_SECONDS:
        line = f"{name}: {progress}"
    else:
        return
    task.fields["printed"] = now
    print(line, file=sys.stderr, flush=True)
