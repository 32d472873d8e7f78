"""What a run found, in every format: text, JSON, HTML, Markdown, JUnit XML and GitHub annotations.

A format is one module and one line in the tables below; everything is made from the types of
vexport.types alone, so that a report.json from elsewhere renders just as well.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from vexport.errors import InputError
from vexport.reports import card, github, history, html, json, junit, loads, markdown, matrix, text
from vexport.reports.files import page_link, run_files
from vexport.types import CheckReport, DryLoadReport, LoadReport, Report, Verdict

T = TypeVar("T")

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": text.report,
    "json": json.report,
    "html": html.report,
    "markdown": markdown.report,
    "card": card.report,
    "junit": junit.report,
    "github": github.report,
}
CHECK_FORMATS: dict[str, Callable[[Sequence[CheckReport]], str]] = {
    "text": text.checks,
    "json": json.checks,
    "junit": junit.checks,
    "github": github.checks,
}
LOAD_FORMATS: dict[str, Callable[[Sequence[LoadReport]], str]] = {
    "text": loads.text,
    "json": json.loads,
    "junit": junit.loads,
    "github": loads.github,
}
DRY_LOAD_FORMATS: dict[str, Callable[[Sequence[DryLoadReport]], str]] = {
    "text": matrix.text,
    "json": matrix.json,
    "junit": matrix.junit,
    "github": matrix.github,
}
HISTORY_FORMATS: dict[str, Callable[[Sequence[history.Run]], str]] = {
    "text": history.text,
    "json": history.json,
    "html": history.html,
    "markdown": history.markdown,
}
VERDICT_FORMATS: dict[str, Callable[[Verdict], str]] = {
    "text": text.verdict,
    "json": json.verdict,
    "junit": junit.verdict,
    "github": github.verdict,
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
    formats: dict[str, Callable[[Report], str]] = {
        **FORMATS,
        "github": partial(github.report, scenario=scenario),
        "html": partial(html.report, files=run_files(folder, page or folder) if folder else ()),
    }
    return _renderer(formats, format)(report)


def render_checks(
    reports: Sequence[CheckReport], format: str, families: Sequence[str] = (), *, every: bool = False
) -> str:
    """Check reports in one of CHECK_FORMATS, in order; JSON is always a list.

    `families` are the names of the checks that looked, of which JUnit shows those without a finding too.
    Text has findings of one kind as one unless `every`.
    """
    formats: dict[str, Callable[[Sequence[CheckReport]], str]] = {
        **CHECK_FORMATS,
        "text": partial(text.checks, every=every),
        "junit": partial(junit.checks, families=families),
    }
    return _renderer(formats, format)(reports)


def summarize_checks(reports: Sequence[CheckReport]) -> str:
    """Check reports as a step summary in Markdown."""
    return markdown.checks(reports)


def render_loads(reports: Sequence[LoadReport], format: str) -> str:
    """Load reports in one of LOAD_FORMATS, in order; JSON is always a list."""
    return _renderer(LOAD_FORMATS, format)(reports)


def render_dry_loads(reports: Sequence[DryLoadReport], format: str) -> str:
    """Dry load reports in one of DRY_LOAD_FORMATS, in order; JSON is always a list."""
    return _renderer(DRY_LOAD_FORMATS, format)(reports)


def render_history(
    reports: Sequence[Report], format: str, *, folders: Sequence[Path] = (), page: Path | None = None
) -> str:
    """Several runs in one of HISTORY_FORMATS, the oldest first.

    `folders` are their run directories in the same order; a page that is to lie in the folder `page` links to
    the page of each run that has one.
    """
    runs = [
        history.Run(
            report=report, folder=folder.name, href=page_link(folder, page) if page is not None else ""
        )
        for report, folder in zip(reports, folders or [Path()] * len(reports), strict=True)
    ]
    return _renderer(HISTORY_FORMATS, format)(runs)


def render_verdict(verdict: Verdict, format: str) -> str:
    """A verdict in one of VERDICT_FORMATS."""
    return _renderer(VERDICT_FORMATS, format)(verdict)


def _renderer(formats: Mapping[str, Callable[[T], str]], name: str) -> Callable[[T], str]:
    if name not in formats:
        raise InputError("--format", got=name, need=" or ".join(formats), fix="name one of these")
    return formats[name]
