"""Reports in every form: text, JSON, HTML, Markdown, JUnit XML and GitHub annotations.

A kind of report is one function that builds its documents (vexport.reports.document), a form one module that
draws them. Each function here is for one kind of report; the command line offers the forms that it has.
"""

from collections.abc import Sequence
from pathlib import Path

from vexport.errors import InputError
from vexport.records import CheckReport, ComparedRun, DryLoadReport, LoadReport, Report, Verdict
from vexport.reports import checkpoints, github, json, junit, markdown, text
from vexport.reports.document import Document


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
            return json.dumps(Report, report)
        case "junit":
            return junit.report(report)
        case "github":
            return github.report(report, scenario)
        case "card":
            return card.render(report)
    files = run_files(folder, page or folder) if format == "html" and folder else ()
    return _drawn([run_document(report, files)], format)


def render_checks(
    reports: Sequence[CheckReport], format: str, families: Sequence[str] = (), *, every: bool = False
) -> str:
    """Check reports in order; JSON is always a list.

    `families` are the names of the checks that looked, of which JUnit shows those without a finding too.
    Text has findings of one kind as one unless `every`.
    """
    match format:
        case "json":
            return json.dumps(list[CheckReport], list(reports))
        case "junit":
            return junit.checks(reports, families)
        case "github":
            return github.checkpoints("check", reports)
    return _drawn(checkpoints.check_documents(reports, every=every), format)


def summarize_checks(reports: Sequence[CheckReport]) -> str:
    """Check reports as a step summary in Markdown."""
    return markdown.render_all(checkpoints.check_documents(reports))


def render_loads(reports: Sequence[LoadReport], format: str) -> str:
    """Load reports in order; JSON is always a list."""
    match format:
        case "json":
            return json.dumps(list[LoadReport], list(reports))
        case "junit":
            return junit.loads(reports)
        case "github":
            return github.checkpoints("load", reports)
    return _drawn(checkpoints.load_documents(reports), format)


def render_dry_loads(reports: Sequence[DryLoadReport], format: str) -> str:
    """Dry load reports in order; JSON is always a list."""
    match format:
        case "json":
            return json.dumps(list[DryLoadReport], list(reports))
        case "junit":
            return junit.dry_loads(reports)
        case "github":
            return github.checkpoints("load", reports)
    return _drawn(checkpoints.dry_load_documents(reports), format)


def render_comparison(runs: Sequence[ComparedRun], format: str) -> str:
    """Several runs in order, as text, JSON, Markdown or a page."""
    from vexport.reports.comparison import comparison_document

    if format == "json":
        return json.dumps(list[ComparedRun], list(runs))
    return _drawn([comparison_document(runs)], format)


def render_verdict(verdict: Verdict, format: str) -> str:
    """A verdict; JSON is an object."""
    return json.dumps(Verdict, verdict) if format == "json" else render_verdicts([verdict], format)


def render_verdicts(verdicts: Sequence[Verdict], format: str) -> str:
    """Verdicts on several checkpoints in order; JSON is a list."""
    from vexport.reports.accuracy import verdict_document

    match format:
        case "json":
            return json.dumps(list[Verdict], list(verdicts))
        case "junit":
            return junit.verdicts(verdicts)
        case "github":
            return "".join(map(github.verdict, verdicts))
    return _drawn([*map(verdict_document, verdicts)], format)


def render_cause(verdict: Verdict) -> str:
    """The cause of a loss as text, for a verdict that has been shown; nothing where it is not known."""
    from vexport.reports.accuracy import cause_parts

    return text.render([Document(title="cause", parts=cause_parts(verdict))]) if verdict.attribution else ""
