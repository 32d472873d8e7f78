"""The parts of a report: built once for each kind of report, drawn by one renderer for each form.

Every text here may come from a checkpoint, a model or a data set: the renderers escape and clip it. Only HTML
draws charts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vexport.records import Finding
from vexport.reports.charts import Forest
from vexport.reports.folding import MAX_FOLLOWING, SEVERITIES, Folded, fold
from vexport.reports.formatting import plural
from vexport.reports.gates import Gate, Status

Form = Literal["text", "markdown", "html"]
FORMS: tuple[Form, ...] = ("text", "markdown", "html")
PAGE: tuple[Form, ...] = ("html",)
SUMMARY: tuple[Form, ...] = ("text", "markdown")


@dataclass(frozen=True, slots=True)
class TableCell:
    """A value with a remark on it (its interval).

    `tone` is the CSS class of a status or severity, `badge` draws the text as a label in that tone; `mono` is
    for names of tensors and layers, `href` a link relative to the page.
    """

    text: str
    note: str = ""
    tone: str = ""
    badge: bool = False
    mono: bool = False
    href: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `omit` names the forms without it, plain text shows notes where `noted`."""

    title: str
    numeric: bool = False
    nowrap: bool = False
    noted: bool = False
    omit: tuple[Form, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns; on a narrow page a row becomes a list unless `stack` is off."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    caption: str = ""
    stack: bool = True

    def shown(self, form: Form) -> "Table":
        """The table with the columns of one form."""
        kept = [form not in column.omit for column in self.columns]
        columns = tuple(column for column, keep in zip(self.columns, kept, strict=True) if keep)
        rows = (tuple(cell for cell, keep in zip(row, kept, strict=True) if keep) for row in self.rows)
        return replace(self, columns=columns, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One or more sentences."""

    text: str
    style: Literal["plain", "muted", "warning"] = "plain"


@dataclass(frozen=True, slots=True)
class Listing:
    """A bulleted list; with a `title` it is set off from the text around it."""

    items: tuple[TableCell, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with what they stand for; a cell's note goes on a line below."""

    rows: tuple[tuple[str, TableCell], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A command to type, or one that was."""

    text: str


@dataclass(frozen=True, slots=True)
class Details:
    """Folded where a form can fold, unless `open`; plain text has the lines of `brief` instead."""

    summary: TableCell
    parts: tuple["Part", ...]
    brief: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True)
class FindingList:
    """Findings with the gate that each belongs to, the gravest first.

    Those of a kind are one unless `every`; `everything` says where all of them are.
    """

    findings: tuple[tuple[str, Finding], ...]
    everything: str
    every: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its answers (each a label, a text and a tone); `group` is what a Filter selects by."""

    label: str
    prompt: str
    answers: tuple[tuple[str, str, str], ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of which exchanges of a section are shown: (group, label)."""

    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text in tokens: (token, heat from 0 to 3, remark)."""

    tokens: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title, in the forms that are named; `lead` says on a page what is to be seen."""

    title: str
    parts: tuple["Part", ...]
    anchor: str = ""
    lead: str = ""
    forms: tuple[Form, ...] = FORMS


Part = (
    Section
    | Table
    | Paragraph
    | Listing
    | Facts
    | Code
    | Details
    | FindingList
    | Exchange
    | Filter
    | Tokens
    | Forest
)


@dataclass(frozen=True, slots=True)
class Tile:
    """A number to see first."""

    label: str
    figure: str
    unit: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report on one thing: its answer, the gates that gave it, and the parts in order.

    `status` is None where there is nothing to answer. `device` ran the model. `next_step` is a command, or
    nothing, and a sentence; `footer` is small print. `wide` text is not wrapped: commands are copied from it.
    """

    title: str
    parts: tuple[Part, ...]
    status: Status | None = None
    device: str = ""
    sentence: str = ""
    subtitle: str = ""
    next_step: tuple[str, str] = ("", "")
    gates: tuple[Gate, ...] = ()
    tiles: tuple[Tile, ...] = ()
    footer: str = ""
    wide: bool = False


def badge(status: str, note: str = "") -> TableCell:
    """A status or severity as a label, in the tone of its first word."""
    return TableCell(status, note, tone=status.partition(" ")[0].lower(), badge=True)


def columns(*titles: str) -> tuple[Column, ...]:
    """Columns by title; those after a `>` hold numbers."""
    return tuple(Column(title.removeprefix(">"), numeric=title.startswith(">")) for title in titles)


def row(*values: TableCell | str) -> tuple[TableCell, ...]:
    """Cells, of which those without a note may be plain text."""
    return tuple(TableCell(value) if isinstance(value, str) else value for value in values)


def facts(*rows: tuple[str, TableCell | str] | None) -> Facts:
    """Facts that there are."""
    return Facts(tuple((pair[0], row(pair[1])[0]) for pair in rows if pair))


def parts(*items: Part | Iterable[Part] | None) -> tuple[Part, ...]:
    """Parts one after the other, without those that there are not."""
    flat: list[Part] = []
    for item in items:
        flat += item if isinstance(item, Iterable) else [item] if item else []
    return tuple(flat)


def muted(text: str) -> Paragraph:
    """Small print."""
    return Paragraph(text, "muted")


def listing(lines: Sequence[str], most: int) -> Listing:
    """List at most that many lines, and how many more there are."""
    more = [f"and {len(lines) - most} more: see --format json"] if len(lines) > most else []
    return Listing(row(*lines[:most], *more))


_Kinds = Sequence[tuple[str, Folded]]


def finding_parts(part: FindingList, limit: int) -> tuple[Part, ...]:
    """Return tables of at most `limit` kinds, below them what may follow from each, and where all findings
    are.
    """
    gates = dict.fromkeys(gate for gate, _ in part.findings)
    kinds = [
        (gate, kind)
        for gate in gates
        for kind in fold([finding for name, finding in part.findings if name == gate])
    ]
    kinds.sort(key=lambda pair: SEVERITIES.index(pair[1].first.severity))
    more = sum(kind.count + kind.following for _, kind in kinds[limit:])
    return parts(
        _table(kinds[:limit]),
        [_following(gate, kind) for gate, kind in kinds[:limit] if kind.follow],
        muted(f"{plural(more, 'more finding')} in {part.everything}") if more else None,
    )


def _table(kinds: _Kinds) -> Table:
    rows = (
        row(
            TableCell(kind.finding.where, note=f"{gate}: {kind.first.check}", mono=True),
            badge(kind.first.severity),
            kind.first.got,
            kind.first.expected,
            kind.finding.fix,
        )
        for gate, kind in kinds
    )
    return Table(columns("Where", "Severity", "Got", "Need", "Do"), tuple(rows))


def _following(gate: str, kind: Folded) -> Details:
    summary = f"{plural(kind.following, 'finding')} that may follow from {kind.places}"
    more = f", {kind.not_shown:,} of them not shown" if kind.not_shown else ""
    shown = [(gate, other) for other in kind.follow[:MAX_FOLLOWING]]
    return Details(TableCell(summary + more), (_table(shown),))
