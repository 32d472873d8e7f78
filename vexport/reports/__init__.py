"""Reports in every form: text, JSON, HTML, Markdown, JUnit XML and GitHub annotations.

A kind of report is one function that builds its documents (vexport.reports.document), a form one module that
draws them. Each function here is for one kind of report; the command line offers the forms that it has. The
answer to several checkpoints keeps their order, and its JSON is a list.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from vexport.errors import InputError
from vexport.records import CheckReport, ComparedRun, DryLoadReport, Json, LoadReport, Report, Verdict
from vexport.reports import checkpoints, ci, markdown, text
from vexport.reports.document import Document
from vexport.reports.findings import check_gates, report_gates, verdict_gates


def _drawn(documents: Sequence[Document], format: str) -> str:
    """Documents as text, Markdown or pages; InputError for another form."""
    if format == "text":
        return text.render(documents)
    if format == "markdown":
        return "".join(map(markdown.render, documents))
    if format == "html":
        from vexport.reports import html

        return "".join(map(html.render, documents))
    raise InputError("--format", got=format, need="a form that this answer has", fix="see --help")


def _json(value: object) -> str:
    """Indented ASCII: terminal controls and lone surrogates leave as JSON escapes, not as themselves."""
    return json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"


def _plain(value: object) -> Json:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _finite(TypeAdapter(type(value)).dump_python(value, mode="json", by_alias=True))


def _finite(value: Json) -> Json:
    """`value` with null for infinities and NaN, which JSON cannot write (as vexport.files.to_json)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(
    report: Report,
    format: str,
    *,
    scenario: Path | None = None,
    folder: Path | None = None,
    page: Path | None = None,
) -> str:
    """The report of a run.

    `scenario` is the file that the annotations of `github` stand at; `folder` the run directory to whose
    files a page links that is to lie in the folder `page`, which is the run directory unless it is given.
    """
    from vexport.reports import card
    from vexport.reports.run import run_document, run_files

    match format:
        case "json":
            return _json(report)
        case "junit":
            return ci.junit([(report.name, report_gates(report))], report.seconds)
        case "github":
            return ci.github_answer(report.name, report_gates(report), scenario)
        case "card":
            return card.render(report)
    files = run_files(folder, page or folder) if format == "html" and folder else ()
    return _drawn([run_document(report, files)], format)


def render_checks(
    reports: Sequence[CheckReport], format: str, families: Sequence[str] = (), *, every: bool = False
) -> str:
    """Check reports.

    `families` are the names of the checks that looked, of which JUnit shows those without a finding too.
    Text has findings of one kind as one unless `every`.
    """
    match format:
        case "json":
            return _json(list(reports))
        case "junit":
            return ci.junit((report.checkpoint, check_gates(report, families)) for report in reports)
        case "github":
            return ci.github_checkpoints("check", reports)
    return _drawn(checkpoints.check_documents(reports, every=every), format)


def summarize_checks(reports: Sequence[CheckReport]) -> str:
    """Check reports as a step summary in Markdown."""
    return markdown.render_all(checkpoints.check_documents(reports))


def render_loads(reports: Sequence[LoadReport | DryLoadReport], format: str) -> str:
    """Loads, or dry loads, of which JUnit has a case for each cell."""
    match format:
        case "json":
            return _json(list(reports))
        case "junit":
            return ci.junit(checkpoints.load_suites(reports))
        case "github":
            return ci.github_checkpoints("load", reports)
    return _drawn(checkpoints.load_documents(reports), format)


def render_comparison(runs: Sequence[ComparedRun], format: str) -> str:
    """Several runs in order, as text, JSON, Markdown or a page."""
    from vexport.reports.run import comparison_document

    return _json(list(runs)) if format == "json" else _drawn([comparison_document(runs)], format)


def render_verdict(verdict: Verdict, format: str) -> str:
    """A verdict; JSON is an object."""
    return _json(verdict) if format == "json" else render_verdicts([verdict], format)


def render_verdicts(verdicts: Sequence[Verdict], format: str) -> str:
    """Verdicts on several checkpoints."""
    from vexport.reports.accuracy import verdict_document

    match format:
        case "json":
            return _json(list(verdicts))
        case "junit":
            names = ["verdict" if len(verdicts) == 1 else verdict.checkpoint for verdict in verdicts]
            return ci.junit(zip(names, map(verdict_gates, verdicts), strict=True))
        case "github":
            return "".join(ci.github_answer("accuracy", verdict_gates(verdict)) for verdict in verdicts)
    return _drawn([*map(verdict_document, verdicts)], format)


def render_cause(verdict: Verdict) -> str:
    """The cause of a loss as text, for a verdict that has been shown; nothing where it is not known."""
    from vexport.reports.accuracy import cause_parts

    return text.render([Document(title="cause", parts=cause_parts(verdict))]) if verdict.attribution else ""
