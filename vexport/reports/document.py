"""Parts of a report: sections, tables, charts and others. vexport.reports.renderers renders them.

There are renderers for text, HTML and Markdown. Texts may come from a checkpoint, a model or a data
set, so the renderers escape and clip them. Only HTML has charts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vexport.records import Finding
from vexport.records.gates import SEVERITIES, Gate, Status
from vexport.records.scale import Scale
from vexport.reports.findings import fold
from vexport.reports.formatting import outcome_line
from vexport.words import plural

if TYPE_CHECKING:
    from vexport.records import Comparison, TaskVerdict, TextLimit

Form = Literal["text", "markdown", "html"]
FORMS: tuple[Form, ...] = ("text", "markdown", "html")
PAGE: tuple[Form, ...] = ("html",)


@dataclass(frozen=True, slots=True)
class TableCell:
    """A value with a note, such as its interval.

    `tone` is the CSS class of a status or severity, and `badge` draws the text as a label in that
    tone. `mono` is for names of tensors and layers. `href` is a link relative to the page.
    """

    text: str
    note: str = ""
    tone: str = ""
    badge: bool = False
    mono: bool = False
    href: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `omit` lists the formats that leave out the column.

    Plain text shows the notes of the cells only if `noted` is True.
    """

    title: str
    numeric: bool = False
    nowrap: bool = False
    noted: bool = False
    omit: tuple[Form, ...] = ()


Row = tuple[TableCell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns. On a narrow page, a row becomes a list unless `stack` is off."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    stack: bool = True

    def shown(self, form: Form) -> "Table":
        """Return the table without the columns that this format leaves out."""
        kept = [number for number, column in enumerate(self.columns) if form not in column.omit]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[number] for number in kept), rows=rows)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One or more sentences. With the style `code`, it is a command to type."""

    text: str
    style: Literal["plain", "muted", "warning", "code"] = "plain"


@dataclass(frozen=True, slots=True)
class Listing:
    """A bulleted list. HTML shows a list with a `title` in a box.

    Text and Markdown put the title before each item.
    """

    items: Row
    title: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and their values.

    HTML shows a cell's note on the line below, and Markdown in brackets. Plain text leaves it out.
    """

    rows: tuple[tuple[str, TableCell], ...]


@dataclass(frozen=True, slots=True)
class Details:
    """Parts that HTML and Markdown show folded. With `open`, HTML shows them unfolded.

    Plain text shows the lines of `brief` instead of the parts.
    """

    summary: TableCell
    parts: tuple["Part", ...]
    brief: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True)
class FindingList:
    """Findings with their gates, the most serious first.

    Findings are grouped by kind. With `every`, plain text shows each finding instead. `everything`
    is the option or file that gives the complete list, such as `--format json`.
    """

    findings: tuple[tuple[str, Finding], ...]
    everything: str
    every: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its responses. Each response is a label, a text and a tone.

    Readers of a page can filter the exchanges of a section by `group`.
    """

    label: str
    prompt: str
    answers: tuple[tuple[str, str, str], ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text as a list of tokens: (token, heat from 0 to 3, note).

    The heat is the shade of the token's background: a larger KL has a darker shade.
    """

    tokens: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Chart of the tasks with the same scale, with lines at zero and at the margin.

    The axis goes from `low` to `high`.
    Positions are in per cent of the width, so the SVG can stretch while its text keeps its size.
    """

    scale: Scale
    tasks: tuple["TaskVerdict", ...]
    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value."""
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 2)

    @property
    def axis_unit(self) -> str:
        """Unit of the axis, in words."""
        return self.scale.unit

    @property
    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the positions of at most seven round values, and their labels."""
        for value in round_values(self.low, self.high, 6):
            shown = value * (100 if self.scale.measure == "share" else 1)
            yield self.at(value), f"{shown:+.3g}" if value else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a chart: its name, its CSS class, and its points (x, y)."""

    name: str
    tone: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves over a logarithmic x axis with marks at `marks`, and a `limit` as a dashed line.

    The y axis is linear, from `low` to `high`. Positions are in per cent, as in `Forest`.
    """

    title: str
    unit: str
    x_unit: str
    curves: tuple[Curve, ...]
    marks: tuple[int, ...]
    low: float
    high: float
    limit: float | None = None

    def across(self, x: float) -> float:
        """Return the position of a value on the x axis."""
        first = math.log(self.marks[0])
        share = (math.log(x) - first) / (math.log(self.marks[-1]) - first)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def down(self, y: float) -> float:
        """Return the distance of a value from the top."""
        return round(100 * (self.high - y) / (self.high - self.low), 2)

    @property
    def x_ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the positions of the marks, and their labels."""
        for mark in self.marks:
            yield self.across(mark), f"{mark:,}"

    @property
    def y_ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the positions of some round values, and their labels."""
        for value in round_values(self.low, self.high, 4):
            yield self.down(value), f"{value:.3g}"


def round_values(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round values from `low` to `high`.

    The values are multiples of 1, 2 or 5 times a power of ten.
    """
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    steps = [power * times for times in (1, 2, 5, 10)]
    step = next(each for each in steps if each >= least * (1 - 1e-9))
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title, shown only in `forms`. `lead` introduces the parts on a page.

    `filters` are the groups of exchanges that a reader of the page can choose: (group, label).
    """

    title: str
    parts: tuple["Part", ...]
    anchor: str = ""
    lead: str = ""
    forms: tuple[Form, ...] = FORMS
    filters: tuple[tuple[str, str], ...] = ()


Part = (
    Section
    | Table
    | Paragraph
    | Listing
    | Facts
    | Details
    | FindingList
    | Exchange
    | Tokens
    | Forest
    | Curves
)


@dataclass(frozen=True, slots=True)
class Tile:
    """A key number at the top of a page."""

    label: str
    figure: str
    unit: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report: the outcome, the gates behind it, and the parts in order.

    - `status` is None if there is nothing to decide.
    - `device` is the device that ran the model.
    - `scope` limits the status, such as `of the static rules`, and `reason` says why.
    - `warnings` follow the sentence: reasons to doubt the status.
    - `next_step` is a command (or "") and its purpose, or other advice.
    - `footer` is small print.
    - `wide` text is not wrapped, because users copy commands from it.
    """

    title: str
    parts: tuple[Part, ...]
    status: Status | None = None
    device: str = ""
    sentence: str = ""
    scope: str = ""
    ignored: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    subtitle: str = ""
    next_step: tuple[str, str] = ("", "")
    gates: tuple[Gate, ...] = ()
    tiles: tuple[Tile, ...] = ()
    footer: str = ""
    wide: bool = False

    @property
    def outcome(self) -> str:
        """Status with the device that ran the model, its scope, and what was ignored."""
        if not self.status:
            return ""
        return outcome_line(self.status, self.device, self.scope, self.ignored)


def badge(status: str) -> TableCell:
    """Return a status or severity as a label. Its CSS class is the first word in lower case."""
    return TableCell(status, tone=status.partition(" ")[0].lower(), badge=True)


def mono(name: str) -> TableCell:
    """Return a cell with the name of a tensor or layer."""
    return TableCell(name, mono=True)


def judged_cell(judged: "Comparison | TaskVerdict | TextLimit") -> TableCell:
    """Return a difference, or the value of a measure, with the bounds that decide."""
    return TableCell(judged.shown, judged.bounds)


def row(*values: TableCell | str) -> Row:
    """Return cells. Values without a note may be given as plain text."""
    return tuple(TableCell(value) if isinstance(value, str) else value for value in values)


def table(
    titles: Sequence[str | Column],
    rows: Iterable[Iterable[TableCell | str]],
    caption: str = "",
    *,
    stack: bool = True,
) -> Table:
    """Return a table. A title that starts with `>` marks a column of numbers."""
    columns = (
        title
        if isinstance(title, Column)
        else Column(title.removeprefix(">"), numeric=title.startswith(">"))
        for title in titles
    )
    return Table(tuple(columns), tuple(row(*values) for values in rows), caption, stack)


def facts(*rows: tuple[str, TableCell | str] | None) -> Facts:
    """Return facts, skipping None."""
    return Facts(tuple((pair[0], row(pair[1])[0]) for pair in rows if pair))


def parts(*items: Part | Iterable[Part] | None) -> tuple[Part, ...]:
    """Return parts in order, skipping None."""
    flat: list[Part] = []
    for item in items:
        flat += item if isinstance(item, Iterable) else [item] if item else []
    return tuple(flat)


def page_section(
    title: str, anchor: str, lead: str, *items: Part | Iterable[Part] | None
) -> Section:
    """Return a section that only HTML shows. The other arguments are the fields of `Section`."""
    return Section(title, parts(*items), anchor, lead, PAGE)


def muted(text: str) -> Paragraph:
    """Return small print."""
    return Paragraph(text, "muted")


def warnings(texts: Iterable[str]) -> list[Paragraph]:
    """Return warnings about a result, a paragraph each."""
    return [Paragraph(text, "warning") for text in texts]


def finding_parts(part: FindingList, limit: int) -> tuple[Part, ...]:
    """Return a table of at most `limit` kinds of findings.

    If kinds are left out, a note counts their findings and names the complete list.
    """
    by_gate: dict[str, list[Finding]] = {}
    for gate, finding in part.findings:
        by_gate.setdefault(gate, []).append(finding)
    kinds = [(gate, kind) for gate, findings in by_gate.items() for kind in fold(findings)]
    kinds.sort(key=lambda pair: SEVERITIES.index(pair[1].first.severity))
    more = sum(kind.count + kind.following for _, kind in kinds[limit:])
    rows = (
        (
            TableCell(
                kind.places, note=f"{gate}: {kind.first.rule or kind.first.check}", mono=True
            ),
            TableCell(kind.first.label, tone=kind.first.severity, badge=True),
            kind.first.got,
            kind.first.expected,
            kind.finding.fix,
        )
        for gate, kind in kinds[:limit]
    )
    return parts(
        table(("Where", "Severity", "Got", "Need", "Do"), rows),
        muted(f"{plural(more, 'more finding')} in {part.everything}") if more else None,
    )
