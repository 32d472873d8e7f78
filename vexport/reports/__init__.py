"""Reports in every format: text, JSON, HTML, Markdown, JUnit XML and GitHub annotations.

Each function here renders one kind of report in a given format. Other modules build the documents
of each kind (vexport.reports.document), and a renderer for each format renders documents. The
command line offers the formats that a kind supports. Reports on several checkpoints keep the order
of the checkpoints, and their JSON is a list.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from vexport.errors import InputError
from vexport.records import CheckReport, DryLoadReport, Json, LoadReport
from vexport.records.gates import Gate, check_gates
from vexport.reports import checkpoints
from vexport.reports.document import Document
from vexport.reports.findings import report_gates, verdict_gates
from vexport.reports.renderers import markdown, text
from vexport.rules import usage as rules

if TYPE_CHECKING:
    from vexport.records import ComparedRun, ComparedVersions, History, Verdict
    from vexport.records.serving import StartupLog
    from vexport.reports.run_record import Report


def _rendered(
    value: object,
    format: str,
    documents: Callable[[], Sequence[Document]],
    suites: Callable[[], Iterable[tuple[str, Sequence[Gate]]]] | None = None,
    annotations: Callable[[], str] | None = None,
    *,
    width: int = text.WIDTH,
) -> str:
    """Return a report in the given format. Raise InputError if the report does not support it.

    JSON is made from `value`. Text, Markdown and HTML are made from `documents()`, JUnit from
    `suites()`, and GitHub annotations from `annotations()`. `width` is the number of columns of
    text.
    """
    match format:
        case "json":
            return _json(value)
        case "junit" if suites:
            from vexport.reports.renderers import ci

            return ci.junit(suites())
        case "github" if annotations:
            return annotations()
        case "text":
            return text.render(documents(), width)
        case "markdown":
            return "".join(map(markdown.render, documents()))
        case "html":
            from vexport.reports.renderers import html

            return "".join(map(html.render, documents()))
    formats = "a format that this result has"
    raise InputError.of(rules.FORMAT, "--format", format=format, formats=formats)


def _json(value: object) -> str:
    """Return indented JSON in ASCII. Control characters and lone surrogates are escaped."""
    return json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"


def _plain(value: object) -> Json:
    """Return the value with null for infinities and NaN, as vexport.files.to_json does."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    plain = TypeAdapter(type(value)).dump_python(value, mode="json", by_alias=True)
    finite: Json = to_jsonable_python(plain, inf_nan_mode="null")
    return finite


def render(
    report: "Report",
    format: str,
    *,
    scenario: Path | None = None,
    folder: Path | None = None,
    page: Path | None = None,
    width: int = text.WIDTH,
) -> str:
    """Return the report of a run.

    `scenario` is the file that GitHub annotations refer to. `folder` is the run directory, and
    `page` is the folder of the HTML page, by default also the run directory. The page's links to
    the files of the run are relative to `page`. `width` is the width of text in columns.
    """
    from vexport.reports import card
    from vexport.reports.renderers import ci
    from vexport.reports.run_document import run_document, run_files

    if format == "card":
        return card.render(report)
    if format == "junit":
        warnings = {report.name: _doubts(report)}
        return ci.junit([(report.name, report_gates(report))], report.call.seconds, warnings)
    files = run_files(folder, page or folder) if format == "html" and folder else ()
    return _rendered(
        report,
        format,
        lambda: [run_document(report, files)],
        annotations=lambda: ci.github_gates(
            report.name, report_gates(report), scenario, _doubts(report)
        ),
        width=width,
    )


def _doubts(report: "Report") -> tuple[str, ...]:
    return report.verdict.warnings if report.verdict else ()


def render_checks(
    reports: Sequence[CheckReport],
    format: str,
    families: Sequence[str] = (),
    *,
    every: bool = False,
    width: int = text.WIDTH,
) -> str:
    """Return check reports.

    `families` are the names of all checks that ran. JUnit shows each of them, even without a
    finding. Text groups findings by kind unless `every` is True.
    """
    return _rendered(
        list(reports),
        format,
        lambda: checkpoints.check_documents(reports, every=every),
        lambda: ((report.checkpoint, check_gates(report, families)) for report in reports),
        lambda: _annotations("check", reports),
        width=width,
    )


def _annotations(command: str, reports: Sequence[CheckReport | LoadReport | DryLoadReport]) -> str:
    from vexport.reports.renderers.ci import github_checkpoints

    return github_checkpoints(command, reports)


def summarize_checks(reports: Sequence[CheckReport]) -> str:
    """Return check reports as a step summary in Markdown."""
    return markdown.render_all(checkpoints.check_documents(reports))


def summarize_loads(reports: Sequence[LoadReport | DryLoadReport]) -> str:
    """Return the reports of loads or dry loads as a step summary in Markdown."""
    return markdown.render_all(checkpoints.load_documents(reports))


def render_loads(
    reports: Sequence[LoadReport | DryLoadReport],
    format: str,
    *,
    every: bool = False,
    width: int = text.WIDTH,
) -> str:
    """Return the reports of loads or dry loads.

    JUnit has a test case for each combination of devices that a dry load tested. Text groups
    findings by kind and shows only the cause of a refusal, unless `every` is True.
    """
    return _rendered(
        list(reports),
        format,
        lambda: checkpoints.load_documents(reports, every=every),
        lambda: checkpoints.load_suites(reports),
        lambda: _annotations("load", reports),
        width=width,
    )


def render_startup_log(log: "StartupLog", format: str, *, width: int = text.WIDTH) -> str:
    """Return the statements of a start-up log as text, JSON, Markdown or HTML."""
    from vexport.reports.serving import startup_log_document

    return _rendered(log, format, lambda: [startup_log_document(log)], width=width)


def render_comparison(runs: "Sequence[ComparedRun]", format: str) -> str:
    """Return a table of several runs, in the given order, as text, JSON, Markdown or HTML."""
    from vexport.reports.run_document import comparison_document

    return _rendered(list(runs), format, lambda: [comparison_document(runs)])


def render_history(history: "History", format: str) -> str:
    """Return the history of a model as text, JSON, Markdown or HTML.

    The JSON is the list of rows, as in `render_comparison`.
    """
    from vexport.reports.history import history_document

    return _rendered(list(history.rows), format, lambda: [history_document(history)])


def render_variants(
    report: "Report", format: str, *, folder: Path, page: Path, width: int = text.WIDTH
) -> str:
    """Return the comparison of a checkpoint's variants.

    JSON contains the rows of the table. All other forms show the whole report of the run directory
    `folder`. `page` is the folder of the HTML page, as in `render`.
    """
    if format == "json":
        return _json(list(report.variants))
    return render(report, format, folder=folder, page=page, width=width)


def render_versions(report: "ComparedVersions", format: str, *, width: int = text.WIDTH) -> str:
    """Return the comparison of a checkpoint in several versions of vLLM."""
    from vexport.reports.renderers import ci
    from vexport.reports.versions import version_gates, versions_document

    gates = version_gates(report)
    return _rendered(
        report,
        format,
        lambda: [versions_document(report)],
        lambda: [(report.checkpoint, gates)],
        lambda: ci.github_gates(report.checkpoint, gates),
        width=width,
    )


def render_verdicts(verdicts: "Sequence[Verdict]", format: str, *, width: int = text.WIDTH) -> str:
    """Return the verdicts on one or several checkpoints.

    The JSON of a single verdict is an object.
    """
    from vexport.reports.accuracy import verdict_document
    from vexport.reports.renderers import ci

    is_one = len(verdicts) == 1
    if format == "junit":
        names = ["verdict" if is_one else each.checkpoint for each in verdicts]
        suites = zip(names, map(verdict_gates, verdicts), strict=True)
        warnings = zip(names, (each.warnings for each in verdicts), strict=True)
        return ci.junit(suites, warnings=dict(warnings))
    return _rendered(
        verdicts[0] if is_one else list(verdicts),
        format,
        lambda: [*map(verdict_document, verdicts)],
        annotations=lambda: "".join(
            ci.github_gates("accuracy", verdict_gates(each), warnings=each.warnings)
            for each in verdicts
        ),
        width=width,
    )


def render_cause(verdict: "Verdict", *, width: int = text.WIDTH) -> str:
    """Return the cause of a loss as text, for a verdict that was shown before.

    Return "" if the cause was not searched for.
    """
    from vexport.reports.accuracy import cause_parts

    return (
        text.render([Document(title="cause", parts=cause_parts(verdict))], width)
        if verdict.attribution
        else ""
    )
