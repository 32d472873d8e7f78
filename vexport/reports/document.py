"""What a report consists of: built once for each kind of report, drawn by one renderer for each form.

Every text here may come from a checkpoint, a model or a data set: the renderers escape and clip it. Only HTML
draws charts.
"""

from dataclasses import dataclass, field
from typing import Literal

from vexport.reports.charts.bars import Bars
from vexport.reports.charts.forest import Forest
from vexport.reports.charts.layers import LayerChart
from vexport.reports.charts.plane import Plane
from vexport.reports.gates import Gate, Status
from vexport.types import Finding

Form = Literal["text", "markdown", "html"]
FORMS: tuple[Form, ...] = ("text", "markdown", "html")
Style = Literal["plain", "muted", "warning"]


@dataclass(frozen=True, slots=True)
class Cell:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under columns; on a narrow page a row becomes a list unless `stack` is off."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    stack: bool = True

    def shown(self, form: Form) -> "Table":
        """The table with the columns of one form."""
        kept = [number for number, column in enumerate(self.columns) if form not in column.omit]
        return Table(
            columns=tuple(self.columns[number] for number in kept),
            rows=tuple(tuple(row[number] for number in kept) for row in self.rows),
            caption=self.caption,
            stack=self.stack,
        )


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One or more sentences."""

    text: str
    style: Style = "plain"


@dataclass(frozen=True, slots=True)
class Listing:
    """A bulleted list; with a `title` it is set off from the text around it."""

    items: tuple[Cell, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with what they stand for; a cell's note goes on a line below."""

    rows: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """What is to be typed, or was."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Folded where a form can fold; plain text has the lines of `brief` instead."""

    summary: Cell
    parts: tuple["Part", ...]
    brief: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingList:
    """Findings with the gate that each belongs to, the gravest first.

    Those of a kind are one unless `every`; `everything` says where all of them are.
    """

    findings: tuple[tuple[str, Finding], ...]
    everything: str
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One answer to a prompt."""

    label: str
    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A prompt with what was answered; `group` is what a Filter selects by."""

    label: str
    prompt: str
    sides: tuple[Side, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of which exchanges of a section are shown: (group, label)."""

    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text in tokens: (token, heat from 0 to 3, remark)."""

    tokens: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Parts under a title, in the forms that are named; `lead` says on a page what is to be seen."""

    title: str
    parts: tuple["Part", ...]
    anchor: str = ""
    lead: str = ""
    forms: tuple[Form, ...] = FORMS


Chart = Bars | Forest | LayerChart | Plane
Part = (
    Section | Table | Paragraph | Listing | Facts | Code | Details | FindingList | Exchange | Filter | Tokens
) | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number to see first."""

    label: str
    figure: str
    unit: str = ""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report on one thing: its answer, the gates that gave it, and the parts in order.

    `status` is None where there is nothing to answer. `device` ran the model. `next_step` is a command, or
    nothing, and a sentence; `footer` is small print.
    """

    title: str
    status: Status | None = None
    device: str = ""
    sentence: str = ""
    subtitle: str = ""
    next_step: tuple[str, str] = ("", "")
    gates: tuple[Gate, ...] = ()
    tiles: tuple[Tile, ...] = ()
    parts: tuple[Part, ...] = field(default=())
    footer: str = ""


def badge(status: str) -> Cell:
    """A status or severity as a label; more words than its first are read in its tone."""
    return Cell(status, tone=status.partition(" ")[0].lower(), badge=True)


def columns(*titles: str, numeric: bool = False) -> tuple[Column, ...]:
    """Columns that are alike."""
    return tuple(Column(title, numeric=numeric) for title in titles)


def cells(*texts: str) -> tuple[Cell, ...]:
    """Plain cells."""
    return tuple(map(Cell, texts))
