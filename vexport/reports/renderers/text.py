"""Render plain text for people: the decision, the reasons and the remedies."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from vexport.errors import visible
from vexport.records import Finding
from vexport.reports import document as doc
from vexport.reports.findings import FindingKind, fold
from vexport.reports.formatting import capitalized
from vexport.words import clip, plural

# Width of text that is not printed on a terminal.
WIDTH = 100
# Limits of the width of text on a terminal. Longer lines are hard to read.
MIN_WIDTH = 60
MAX_WIDTH = 120
UNWRAPPED = 4096
MAX_FINDINGS = 20
# Start of a warning.
WARNING = "warning  "
# Where all findings are listed.
_ALL = "see --format json (or `check --all`)"
# Number of columns between two columns of a table.
_COLUMN_GAP = 2
_MAX_TEXT = 1000
# Parts of a text that stay on one line: shapes (`[128, 1]`), numbers with their units, names with
# their numbers (`SM 90`, `group_size 128`), and short commands in backticks.
_KEPT_TOGETHER = re.compile(
    r"\[\d[\d, ]{0,28}\]|\b\d+ x \d+\b|`[^`\n]{1,50}`"
    r"|(?<![\w.])\d[\d.,]* (?:B|[kMGTP]B|GiB|dB|bits?|nats|points?|%|s|min|h)(?!\w)"
    r"|\b(?:SM|TP|sm|tp|vLLM|[^\W_]+(?:_[^\W_]+)+) \d"
)
# Replaces each space in these parts until the text is wrapped, so that lines do not break there.
_KEPT_SPACE = "\ue000"


def render(documents: Sequence[doc.Document], width: int = WIDTH) -> str:
    """Return the documents in order, wrapped at `width` columns.

    Wide documents are not wrapped.
    """
    if any(document.wide for document in documents):
        width = UNWRAPPED
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for document in documents:
            for block in _document(document, width):
                # Outside a group, rich breaks long words of a text in spite of its settings.
                console.print(Group(block), crop=False)
                console.print()
    printed = capture.get().replace(_KEPT_SPACE, " ")
    return "\n".join(line.rstrip() for line in printed.splitlines()).rstrip() + "\n"


def harmless(text: str) -> Text:
    """Return text from outside without console markup and escape sequences, clipped."""
    return Text(_printable(text), overflow="fold")


def _printable(text: str) -> str:
    """Return clipped text without escape sequences.

    Spaces inside parts that stay on one line are replaced by `_KEPT_SPACE`.
    """
    clipped = visible(clip(text, _MAX_TEXT)).replace(_KEPT_SPACE, "\N{REPLACEMENT CHARACTER}")
    return _KEPT_TOGETHER.sub(lambda match: match[0].replace(" ", _KEPT_SPACE), clipped)


def _wrapped(text: str, width: int, start: str = "", end: str = "") -> Text:
    """Return a text between `start` and `end`, in lines of at most `width` columns.

    Further lines are indented by the width of `start`. A word is never broken, because users copy
    paths and names. A line with a longer word exceeds `width`. `end` is not broken either.
    """
    printed = _printable(text) + _printable(end).replace(" ", _KEPT_SPACE)
    lines = [start]
    is_first = True
    for word in re.findall(r"\s*\S+", printed):
        if not is_first and cell_len(lines[-1] + word) > width:
            lines.append(" " * cell_len(start))
            word = word.lstrip()
        lines[-1] += word
        is_first = False
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def _document(document: doc.Document, width: int) -> Iterator[RenderableType]:
    if document.status:
        yield Group(
            _wrapped(f"{document.outcome}  {document.title}", width),
            *([_wrapped(document.reason, width)] if document.reason else []),
            _wrapped(capitalized(document.sentence), width),
            *(_wrapped(text, width, WARNING) for text in document.warnings),
        )
    if document.gates:
        yield _aligned([(gate.name, gate.status, gate.summary) for gate in document.gates], width)
    for part in document.parts:
        yield from _part(part, width)


def _part(part: doc.Part, width: int) -> Iterator[RenderableType]:
    """Yield the blocks of a part. An empty line follows each block.

    Parts that only HTML shows have no blocks.
    """
    match part:
        case doc.Section() if "text" in part.forms:
            yield from _section(part, width)
        case doc.Table():
            yield from _table(part.shown("text"), width)
        case doc.Facts() if part.rows:
            yield _facts(part, width)
        case doc.Paragraph():
            start = WARNING if part.style == "warning" else ""
            yield _wrapped(part.text, width, start)
        case doc.Listing():
            title = f"{part.title}: " if part.title else ""
            start = "" if title else "  "
            yield Group(*(_wrapped(title + item.text, width, start) for item in part.items))
        case doc.Details() if part.brief:
            yield Group(*(_wrapped(line, width) for line in part.brief))
        case doc.FindingList():
            yield from _findings(part, width)


def _section(section: doc.Section, width: int) -> Iterator[RenderableType]:
    """Yield the parts below the title.

    A section with an anchor gets no title, because its content is clear without it.
    """
    blocks = [block for part in section.parts for block in _part(part, width)]
    if blocks and section.title and not section.anchor:
        blocks[0] = Group(harmless(section.title), blocks[0])
    yield from blocks


def _table(table: doc.Table, width: int) -> Iterator[RenderableType]:
    texts = [
        [
            f"{cell.text} ({cell.note})" if column.noted and cell.note else cell.text
            for column, cell in zip(table.columns, row, strict=True)
        ]
        for row in table.rows
    ]
    titles = [harmless(column.title) for column in table.columns]
    rows = [[harmless(text) for text in row] for row in texts]
    widths = _column_widths(table.columns, [titles, *rows], width)
    if widths is None:
        for row in texts:
            yield _stacked([column.title for column in table.columns], row, width)
    else:
        yield _grid(table.columns, titles, rows, widths)
    if table.caption:
        yield _wrapped(table.caption, width)


def _stacked(titles: Sequence[str], cells: Sequence[str], width: int) -> RenderableType:
    """Return a row of a table that is too wide: its first cell, and the other cells as a list."""
    pairs = zip(titles[1:], cells[1:], strict=True)
    values = [(title, cell) for title, cell in pairs if cell]
    return Group(_wrapped(cells[0], width), _aligned(values, width, indent=2))


def _grid(
    columns: Sequence[doc.Column],
    titles: Sequence[Text],
    rows: Sequence[Sequence[Text]],
    widths: Sequence[int],
) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, title, column_width in zip(columns, titles, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        grid.add_column(
            title,
            justify=justify,
            overflow="fold",
            no_wrap=column.nowrap,
            width=column_width,
        )
    for row in rows:
        grid.add_row(*row)
    return grid


def _column_widths(
    columns: Sequence[doc.Column], rows: Sequence[Sequence[Text]], width: int
) -> Sequence[int] | None:
    """Return column widths with which a table fits into `width` without breaking a word.

    The widest columns shrink first. Returns None if the table cannot fit without breaking words.
    """
    cells = list(zip(*rows, strict=True))
    widths = [max(text.cell_len for text in column) for column in cells]
    words = [max(_longest_word(text) for text in column) for column in cells]
    least = [
        widths[number] if column.nowrap else words[number] for number, column in enumerate(columns)
    ]
    available = width - _COLUMN_GAP * (len(columns) - 1)
    if sum(least) > available:
        return None
    while sum(widths) > available:
        shrinkable = [number for number in range(len(columns)) if widths[number] > least[number]]
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(text: Text) -> int:
    return max((cell_len(word) for word in text.plain.split()), default=0)


def _aligned(
    rows: Sequence[tuple[str, ...]], width: int, indent: int = 0, gap: int = _COLUMN_GAP
) -> RenderableType:
    """Return rows with aligned columns. The last column is wrapped below its first line."""
    columns = list(zip(*([_printable(cell) for cell in row[:-1]] for row in rows), strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = [
            cell + " " * (column_width - cell_len(cell) + gap)
            for cell, column_width in zip(map(_printable, row[:-1]), widths, strict=True)
        ]
        lines.append(_wrapped(row[-1], width, " " * indent + "".join(cells)))
    return Group(*lines)


def _facts(part: doc.Facts, width: int) -> RenderableType:
    """Return labels and values. Names and commands (`mono`) stay on one line: users copy them."""
    gap = " " * _COLUMN_GAP
    labels = max(cell_len(_printable(label)) for label, _ in part.rows)
    lines = []
    for label, cell in part.rows:
        start = _printable(label) + " " * (labels - cell_len(_printable(label))) + gap
        lines.append(_wrapped(cell.text, UNWRAPPED if cell.mono else width, start))
    return Group(*lines)


def _findings(part: doc.FindingList, width: int) -> Iterator[RenderableType]:
    """Yield a block for each kind of finding, or for each finding if `every` is True.

    A block has the place, what was found, what is needed, and the remedy.
    """
    findings = [finding for _, finding in part.findings]
    if part.every:
        for finding in findings:
            yield _finding(finding, width, every=True)
        return
    folded = fold(findings)
    for kind in folded[:MAX_FINDINGS]:
        yield _kind(kind, width)
    if more := sum(kind.count + kind.following for kind in folded[MAX_FINDINGS:]):
        yield Text(f"{plural(more, 'more finding')}: see --format json")


def _kind(kind: FindingKind, width: int) -> RenderableType:
    lines = []
    if kind.count > 1:
        lines.append(Text(f"  and {kind.count - 1:,} more like it: {_ALL}"))
    if kind.following:
        lines.append(_wrapped(f"{kind.consequences}; correct it and check again: {_ALL}", width))
    return Group(_finding(replace(kind.first, where=kind.places), width), *lines)


def _finding(finding: Finding, width: int, *, every: bool = False) -> RenderableType:
    rule = f"[{finding.rule or finding.check}]"
    head = _wrapped(f"{finding.where}  ", width, f"{finding.label}  ", rule)
    # If nothing is expected, `got` is a whole sentence and gets no label.
    label = "got" if finding.expected else ""
    rows = [(label, finding.got), ("need", finding.expected), ("do", finding.fix)]
    rows += [("at", place) for place in finding.places] if every else []
    return Group(head, _aligned([row for row in rows if row[1]], width, indent=2))
