"""The tables in vexport/docs/robustness.md, a row at a time."""

from collections.abc import Mapping, Sequence

from calling import ROOT

MISSING, LOST, END = "-", "LOST", "<!-- end -->\n"
PAGE = ROOT / "vexport" / "docs" / "robustness.md"


def write_cells(table: str, title: str, cells: Mapping[str, str], columns: Sequence[str]) -> None:
    """Replace these cells of the row with a title, or add the row; its other cells stay."""
    before, head, lines, after = _read(table)
    earlier = lines.get(title, [MISSING] * len(columns))
    lines[title] = [cells.get(column, cell) for column, cell in zip(columns, earlier, strict=True)]
    table_rows = [f"| {' | '.join([name, *others])} |\n" for name, others in lines.items()]
    PAGE.write_text(before + head + "".join(table_rows) + after, encoding="utf-8")


def is_held(table: str, title: str, column: int) -> bool:
    """Whether a cell was measured and held."""
    *_, lines, _ = _read(table)
    return not lines.get(title, [MISSING] * (column + 1))[column].startswith((MISSING, LOST))


def _read(table: str) -> tuple[str, str, dict[str, list[str]], str]:
    """What stands before a table, its head, its rows by their title, and its end with what follows."""
    begin = f"<!-- written by scripts/faults/run.py: {table} -->\n"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    body, end, after = rest.partition(END)
    assert end, f"{PAGE} has no table {table}"
    head, rows = body.splitlines(keepends=True)[:2], body.splitlines()[2:]
    lines = {name: others for name, *others in (row.strip("| ").split(" | ") for row in rows)}
    return before, found + "".join(head), lines, end + after
