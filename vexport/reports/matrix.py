"""The matrix of a dry load: kinds of layers by tensor parallel size and compute capability."""

import io
import json as standard_json
from collections.abc import Sequence

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vexport.reports import github as github_format
from vexport.reports import junit as junit_format
from vexport.reports import text as text_format
from vexport.reports.escaping import visible
from vexport.types import CellStatus, DryLoadReport, LoadReport, MatrixCell, MatrixRow

_WHOLE = "whole checkpoint"
_SHORT: dict[CellStatus, str] = {
    "loads": "loads",
    "other precision": "loads",
    "faulty": "FAULTY",
    "refused": "REFUSED",
    "not shown": "not shown",
}


def text(reports: Sequence[DryLoadReport]) -> str:
    """For each checkpoint the answer and the findings as of a load, then the matrix, 100 columns wide."""
    return "".join(text_format.loads([_as_load(report)]) + "\n" + _matrix(report) for report in reports)


def json(reports: Sequence[DryLoadReport]) -> str:
    """Always a list, in the order of the command line (dry-load.schema.json)."""
    plain = TypeAdapter(list[DryLoadReport]).dump_python(list(reports), mode="json")
    return standard_json.dumps(plain, indent=2) + "\n"


def junit(reports: Sequence[DryLoadReport]) -> str:
    """One suite per checkpoint, as of a load."""
    return junit_format.loads([_as_load(report) for report in reports])


def github(reports: Sequence[DryLoadReport]) -> str:
    """Annotations, as of a load."""
    return github_format.loads([_as_load(report) for report in reports])


def _as_load(report: DryLoadReport) -> LoadReport:
    return LoadReport(checkpoint=report.checkpoint, ok=report.ok, findings=report.findings)


def _matrix(report: DryLoadReport) -> str:
    """A table for each run of tensor parallel sizes whose columns are alike, and what it does not show."""
    console = Console(
        file=io.StringIO(),
        width=text_format.WIDTH,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for sizes in _alike(report):
            console.print(_table(report, sizes))
        console.print(f"vLLM {report.vllm}, model class and loaders on headers alone")
        for spot in report.blind_spots:
            console.print(f"not shown: {spot}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _alike(report: DryLoadReport) -> list[tuple[int, ...]]:
    """The tensor parallel sizes, together where every cell says the same."""
    found: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for size in dict.fromkeys(cell.tp for cell in report.cells):
        rows = (report.cells, *(row.cells for row in report.rows))
        said = tuple(tuple(_say(cell) for cell in cells if cell.tp == size) for cells in rows)
        found.setdefault(said, []).append(size)
    return [tuple(sizes) for sizes in found.values()]


def _table(report: DryLoadReport, sizes: tuple[int, ...]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=f"tp {', '.join(map(str, sizes))}", title_justify="left", pad_edge=False
    )
    table.add_column("layers")
    table.add_column("stored")
    columns = [cell for cell in report.cells if cell.tp == sizes[0]]
    for cell in columns:
        table.add_column(f"SM {cell.sm}", overflow="fold")
    table.add_row(_WHOLE, "", *(_say(cell) for cell in columns))
    if any(cell.status not in ("refused", "not shown") for cell in columns):
        for (stored, *said), rows in _equal_rows(report, sizes[0]).items():
            table.add_row(Text(visible(_names(rows))), stored, *said)
    return table


def _equal_rows(report: DryLoadReport, tp: int) -> dict[tuple[str, ...], list[MatrixRow]]:
    """The kinds of layers that are stored alike and do alike, together."""
    found: dict[tuple[str, ...], list[MatrixRow]] = {}
    for row in report.rows:
        said = tuple(_say(cell) for cell in row.cells if cell.tp == tp)
        found.setdefault((row.stored, *said), []).append(row)
    return found


def _names(rows: Sequence[MatrixRow]) -> str:
    """The last part of each name, once, and how many layers that is."""
    names = dict.fromkeys(row.name.rpartition(".")[2] for row in rows)
    return f"{' '.join(names)} ({sum(row.count for row in rows)})"


def _say(cell: MatrixCell) -> str:
    """A cell in few words: precision and kernel of a layer, or what became of the checkpoint."""
    if not cell.precision or cell.status in ("refused", "not shown"):
        return _SHORT[cell.status]
    mark = "FAULTY " if cell.status == "faulty" else ""
    kernel = cell.kernel.removesuffix("LinearKernel").removesuffix("ScaledMM")
    return f"{mark}{cell.precision} {kernel}".strip()
