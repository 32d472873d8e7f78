"""What a run found, in every format: text, JSON, HTML, Markdown, JUnit XML and GitHub annotations.

A kind of report is one function that builds its documents (vexport.reports.document), a form one module that
draws them; the tables below say which kind has which forms.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from vexport.errors import InputError
from vexport.reports import card, github, html, json, junit, markdown, text
from vexport.reports import document as doc
from vexport.reports.accuracy import cause_parts, verdict_document
from vexport.reports.checkpoints import (
    check_documents,
    dry_load_documents,
    load_documents,
)
from vexport.reports.comparison import comparison_document
from vexport.reports.run import run_document, run_files
from vexport.types import (
    CheckReport,
    ComparedRun,
    DryLoadReport,
    LoadReport,
    Report,
    Verdict,
)

T = TypeVar("T")

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: text.render([run_document(report)]),
    "json": lambda report: json.dumps(Report, report),
    "html": lambda report: html.render(run_document(report)),
    "markdown": lambda report: markdown.render(run_document(report)),
    "card": card.render,
    "junit": junit.report,
    "github": github.report,
}
CHECK_FORMATS: dict[str, Callable[[Sequence[CheckReport]], str]] = {
    "text": lambda reports: text.render(check_documents(reports)),
    "json": lambda reports: json.dumps(list[CheckReport], list(reports)),
    "junit": junit.checks,
    "github": partial(github.checkpoints, "check"),
}
LOAD_FORMATS: dict[str, Callable[[Sequence[LoadReport]], str]] = {
    "text": lambda reports: text.render(load_documents(reports)),
    "json": lambda reports: json.dumps(list[LoadReport], list(reports)),
    "junit": junit.loads,
    "github": partial(github.checkpoints, "load"),
}
DRY_LOAD_FORMATS: dict[str, Callable[[Sequence[DryLoadReport]], str]] = {
    "text": lambda reports: text.render(dry_load_documents(reports)),
    "json": lambda reports: json.dumps(list[DryLoadReport], list(reports)),
    "junit": junit.dry_loads,
    "github": partial(github.checkpoints, "load"),
}
COMPARISON_FORMATS: dict[str, Callable[[Sequence[ComparedRun]], str]] = {
    "text": lambda runs: text.render([comparison_document(runs)]),
    "json": lambda runs: json.dumps(list[ComparedRun], list(runs)),
    "html": lambda runs: html.render(comparison_document(runs)),
    "markdown": lambda runs: markdown.render(comparison_document(runs)),
}
VERDICT_FORMATS: dict[str, Callable[[Sequence[Verdict]], str]] = {
    "text": lambda verdicts: text.render([*map(verdict_document, verdicts)]),
    "json": lambda verdicts: json.dumps(list[Verdict], list(verdicts)),
    "junit": junit.verdicts,
    "github": lambda verdicts: "".join(map(github.verdict, verdicts)),
}


def render(
    report: Report,
    format: str,
    *,
    scenario: Path | None = None,
    folder: Path | None = None,
    page: Path | None = None,
) -> str:
    """The report of a run in one of FORMATS; InputError for another name.

    `scenario` is the file that the annotations of `github` stand at; `folder` the run directory to whose
    files a page links that is to lie in the folder `page`, which is the run directory unless it is given.
    """
    if format == "github":
        return github.report(report, scenario)
    if format == "html":
        return html.render(run_document(report, run_files(folder, page or folder) if folder else ()))
    return _renderer(FORMATS, format)(report)


def render_checks(
    reports: Sequence[CheckReport], format: str, families: Sequence[str] = (), *, every: bool = False
) -> str:
    """Check reports in one of CHECK_FORMATS, in order; JSON is always a list.

    `families` are the names of the checks that looked, of which JUnit shows those without a finding too.
    Text has findings of one kind as one unless `every`.
    """
    if format == "text":
        return text.render(check_documents(reports, every=every))
    if format == "junit":
        return junit.checks(reports, families)
    return _renderer(CHECK_FORMATS, format)(reports)


def summarize_checks(reports: Sequence[CheckReport]) -> str:
    """Check reports as a step summary in Markdown."""
    return markdown.render_all(check_documents(reports))


def render_loads(reports: Sequence[LoadReport], format: str) -> str:
    """Load reports in one of LOAD_FORMATS, in order; JSON is always a list."""
    return _renderer(LOAD_FORMATS, format)(reports)


def render_dry_loads(reports: Sequence[DryLoadReport], format: str) -> str:
    """Dry load reports in one of DRY_LOAD_FORMATS, in order; JSON is always a list."""
    return _renderer(DRY_LOAD_FORMATS, format)(reports)


def render_comparison(runs: Sequence[ComparedRun], format: str) -> str:
    """Several runs in one of COMPARISON_FORMATS, in order."""
    return _renderer(COMPARISON_FORMATS, format)(runs)


def render_verdict(verdict: Verdict, format: str) -> str:
    """A verdict in one of VERDICT_FORMATS; JSON is an object."""
    return json.dumps(Verdict, verdict) if format == "json" else render_verdicts([verdict], format)


def render_verdicts(verdicts: Sequence[Verdict], format: str) -> str:
    """Verdicts on several checkpoints in one of VERDICT_FORMATS, in order; JSON is a list."""
    return _renderer(VERDICT_FORMATS, format)(verdicts)


def render_cause(verdict: Verdict) -> str:
    """The cause of a loss as text, for a verdict that has been shown; nothing where it is not known."""
    return (
        text.render([doc.Document(title="cause", parts=cause_parts(verdict))]) if verdict.attribution else ""
    )


def _renderer(formats: Mapping[str, Callable[[T], str]], name: str) -> Callable[[T], str]:
    if name not in formats:
        raise InputError("--format", got=name, need=" or ".join(formats), fix="name one of these")
    return formats[name]
