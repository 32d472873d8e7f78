"""Several loads of each checkpoint: a matrix of checkpoints by vLLM and mode above what each load showed."""

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.table import Table

from vexport.reports import github as github_format
from vexport.reports import text as text_format
from vexport.reports.columns import column_names
from vexport.reports.escaping import visible
from vexport.types import ENGINE_CHECK, DryLoadReport, LoadReport


def text(reports: Sequence[LoadReport]) -> str:
    """The matrix, where there is one, then each load's answer, engine and findings."""
    return versions(reports) + text_format.loads(titled(reports))


def github(reports: Sequence[LoadReport]) -> str:
    """Annotations that name the checkpoint with its vLLM and mode."""
    return github_format.loads(titled(reports))


def titled(reports: Sequence[LoadReport]) -> list[LoadReport]:
    """The reports with what tells them apart in the name of the checkpoint."""
    return [
        replace(report, checkpoint=f"{report.checkpoint} ({column})" if column else report.checkpoint)
        for report, column in zip(reports, column_names(reports), strict=True)
    ]


def versions(reports: Sequence[LoadReport | DryLoadReport]) -> str:
    """Rows checkpoints, columns vLLM and mode; nothing where there is one column."""
    columns = column_names(reports)
    names = list(dict.fromkeys(columns))
    if len(names) < 2:
        return ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("checkpoint", *names):
        table.add_column(visible(name), overflow="fold")
    said = {
        (report.checkpoint, column): _say(report) for report, column in zip(reports, columns, strict=True)
    }
    for checkpoint in dict.fromkeys(report.checkpoint for report in reports):
        table.add_row(visible(checkpoint), *(said[checkpoint, name] for name in names))
    return text_format.plain(table) + "\n"


def _say(report: LoadReport | DryLoadReport) -> str:
    """A cell in few words."""
    if isinstance(report, DryLoadReport):
        loaded = sum(cell.status in ("loads", "other precision") for cell in report.cells)
        answer = "loads" if report.ok else "FAILS"
        return answer if loaded == len(report.cells) else f"{answer} ({loaded} of {len(report.cells)} cells)"
    if report.ok:
        return "loads"
    first = next(finding for finding in report.findings if finding.severity == "error")
    return {"load": "REFUSED", ENGINE_CHECK: "NO ANSWER"}.get(first.check, f"FAULTY: {first.check}")
