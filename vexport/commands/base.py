"""What every command shares: its exit codes, its answer, and how findings and verdicts become a code."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from vexport.errors import CheckpointFailed, EnvironmentFault, Inconclusive
from vexport.types import ENGINE_CHECK, DryLoadReport, Finding, LoadReport

EXIT_CODES = """
Exit codes: 0 pass; 1 the checkpoint fails; 2 bad usage or input; 3 inconclusive; 4 the environment is at
fault (vLLM missing, crashed, out of memory, timed out); 130 interrupted.
"""


def command(name: str | None = None) -> Callable[[Callable[..., None]], click.Command]:
    """A command named `name`, or like its function, with --quiet and --debug."""

    def decorate(function: Callable[..., None]) -> click.Command:
        made = click.command(name, epilog=EXIT_CODES)(function)
        made.params += [
            click.Option(["--quiet"], is_flag=True, help="No progress on stderr."),
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."),
        ]
        return made

    return decorate


def print_text(text: str) -> None:
    """The answer of a command, on stdout."""
    click.echo(text, nl=not text.endswith("\n"))


def add_step_summary(markdown: str) -> None:
    """Append to the summary of the step of GitHub Actions that runs this; nothing elsewhere."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(markdown)


def require_ok(checkpoint: str, ok: bool, findings: Sequence[Finding]) -> None:
    """Exit with 1 where a checkpoint has an error finding, naming the first."""
    if ok:
        return
    errors = [finding for finding in findings if finding.severity == "error"]
    more = f" ({len(errors) - 1} more above)" if len(errors) > 1 else ""
    first = errors[0]
    raise CheckpointFailed(
        f"{checkpoint}: {first.where}", got=first.got, need=first.expected, fix=first.fix + more
    )


def require_loaded(reports: Sequence[LoadReport | DryLoadReport]) -> None:
    """Exit with 1 where a checkpoint fails, else with 4 where an engine died before it could tell."""
    for report in reports:
        own = [finding for finding in report.findings if finding.check != ENGINE_CHECK]
        require_ok(report.checkpoint, report.ok or not own, own)
    for finding in (finding for report in reports for finding in report.findings):
        if finding.check == ENGINE_CHECK:
            raise EnvironmentFault(finding.where, got=finding.got, need=finding.expected, fix=finding.fix)


def conclude(outcome: str, name: str, reason: str) -> None:
    """Exit with 1 for FAIL and 3 for INCONCLUSIVE."""
    if outcome == "FAIL":
        fix = "see the report; keep the worst layers or choose a scheme with more bits"
        raise CheckpointFailed(name, got=f"FAIL: {reason}", need="a loss within the margin", fix=fix)
    if outcome == "INCONCLUSIVE":
        fix = "use more documents or a wider margin"
        raise Inconclusive(name, got=f"INCONCLUSIVE: {reason}", need="evidence that settles it", fix=fix)
