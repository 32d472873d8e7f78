"""The matrix of a dry load: kinds of layers by tensor parallel size and compute capability."""

import io
import json as standard_json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vexport.reports import github as github_format
from vexport.reports import junit as junit_format
from vexport.reports import text as text_format
from vexport.reports.escaping import visible
from vexport.reports.loads import titled, versions
from vexport.types import CellStatus, DryLoadReport, LoadReport, MatrixCell, MatrixRow

_WHOLE = "whole checkpoint"
_TONE: dict[CellStatus, str] = {
    "loads": "pass",
    "other precision": "warning",
    "faulty": "fail",
    "refused": "fail",
    "not shown": "skipped",
}
_SHORT: dict[CellStatus, str] = {
    "loads": "loads",
    "other precision": "loads",
    "faulty": "FAULTY",
    "refused": "REFUSED",
    "not shown": "not shown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """A cell in few words, and how good that is: pass, warning, fail or skipped."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Kinds of layers that are stored alike and do alike."""

    name: str
    stored: str
    cells: tuple[TableCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTable:
    """The tensor parallel sizes (`1, 2, 4`) whose columns, one for each capability, say the same."""

    sizes: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]


def text(reports: Sequence[DryLoadReport]) -> str:
    """For each checkpoint and vLLM the answer and the findings as of a load, then the matrix of its cells.

    Above them, where there are several vLLMs, checkpoints by version; 100 columns wide.
    """
    blocks = zip(_as_loads(reports), reports, strict=True)
    shown = (text_format.loads([load]) + "\n" + _matrix(report) for load, report in blocks)
    return versions(reports) + "".join(shown)


def json(reports: Sequence[DryLoadReport]) -> str:
    """Always a list, in the order of the command line (dry-load.schema.json)."""
    plain = TypeAdapter(list[DryLoadReport]).dump_python(list(reports), mode="json")
    return standard_json.dumps(plain, indent=2) + "\n"


def junit(reports: Sequence[DryLoadReport]) -> str:
    """One suite per checkpoint and vLLM, one case per cell."""
    return junit_format.dry_loads(reports)


def github(reports: Sequence[DryLoadReport]) -> str:
    """Annotations, as of a load."""
    return github_format.loads(_as_loads(reports))


def _as_loads(reports: Sequence[DryLoadReport]) -> list[LoadReport]:
    return titled(
        [
            LoadReport(
                checkpoint=report.checkpoint,
                ok=report.ok,
                findings=report.findings,
                vllm=report.vllm,
                vllm_python=report.vllm_python,
            )
            for report in reports
        ]
    )


def matrix_tables(report: DryLoadReport) -> tuple[MatrixTable, ...]:
    """The matrix without repetition; the first row of each table is the whole checkpoint."""
    return tuple(_table(report, sizes) for sizes in _alike(report))


def _matrix(report: DryLoadReport) -> str:
    """The tables and what they do not show."""
    console = Console(
        file=io.StringIO(),
        width=text_format.WIDTH,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for table in matrix_tables(report):
            console.print(_drawn(table))
        console.print(f"vLLM {report.vllm}, model class and loaders on headers alone")
        for spot in report.blind_spots:
            console.print(f"not shown: {spot}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _drawn(table: MatrixTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, title=f"tp {table.sizes}", title_justify="left", pad_edge=False)
    drawn.add_column("layers")
    drawn.add_column("stored")
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(Text(visible(row.name)), row.stored, *(cell.text for cell in row.cells))
    return drawn


def _alike(report: DryLoadReport) -> list[tuple[int, ...]]:
    """The tensor parallel sizes, together where every cell says the same."""
    found: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for size in dict.fromkeys(cell.tp for cell in report.cells):
        rows = (report.cells, *(row.cells for row in report.rows))
        said = tuple(tuple(_say(cell) for cell in cells if cell.tp == size) for cells in rows)
        found.setdefault(said, []).append(size)
    return [tuple(sizes) for sizes in found.values()]


def _table(report: DryLoadReport, sizes: tuple[int, ...]) -> MatrixTable:
    columns = [cell for cell in report.cells if cell.tp == sizes[0]]
    rows = [TableRow(name=_WHOLE, stored="", cells=_cells(columns))]
    if any(cell.status not in ("refused", "not shown") for cell in columns):
        rows += [
            TableRow(name=_names(alike), stored=stored, cells=cells)
            for (stored, cells), alike in _equal_rows(report, sizes[0]).items()
        ]
    return MatrixTable(
        sizes=", ".join(map(str, sizes)),
        columns=tuple(f"SM {cell.sm}" for cell in columns),
        rows=tuple(rows),
    )


def _equal_rows(report: DryLoadReport, tp: int) -> dict[tuple[str, tuple[TableCell, ...]], list[MatrixRow]]:
    """The kinds of layers that are stored alike and do alike, together."""
    found: dict[tuple[str, tuple[TableCell, ...]], list[MatrixRow]] = {}
    for row in report.rows:
        found.setdefault((row.stored, _cells([c for c in row.cells if c.tp == tp])), []).append(row)
    return found


def _cells(cells: Sequence[MatrixCell]) -> tuple[TableCell, ...]:
    return tuple(TableCell(text=_say(cell), tone=_TONE[cell.status]) for cell in cells)


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
