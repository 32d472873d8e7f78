"""Markdown for a CI step summary or a model card; a summary stays far below GitHub's limit of 1 MiB."""

import re
from collections.abc import Callable, Mapping, Sequence

from vexport.reports.document import (
    Cell,
    Code,
    Details,
    Document,
    Facts,
    FindingList,
    Listing,
    Paragraph,
    Part,
    Section,
    Table,
    cells,
    columns,
)
from vexport.reports.escaping import clip, visible
from vexport.reports.findings import finding_parts
from vexport.reports.formatting import plural
from vexport.reports.sentences import opening, outcome_line

# GitHub refuses a step's summary above 1 MiB; other writers of the same step need room too.
SUMMARY_BYTES = 1 << 19
MAX_DOCUMENTS = 100
MAX_FINDINGS = 20
_MAX_CELL = 600
_MAX_TEXT = 4000
_PUNCTUATION = re.compile(r"([\\`*_\[\]|~#{}!])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": "&#58;//", "www.": "www&#46;"}


def render(document: Document) -> str:
    """One document."""
    status = f"{safe(outcome_line(document.status, document.device))}: " if document.status else ""
    gates = Table(
        columns=columns("Gate", "Result", "Why"),
        rows=tuple(cells(gate.name, gate.status, gate.summary) for gate in document.gates),
    )
    blocks = [
        f"## {status}{safe(document.title)}",
        safe(opening(document.sentence)) if document.sentence else "",
        _table(gates, 3) if document.gates else "",
        parts(document.parts),
        f"<sub>{safe(document.footer)}</sub>" if document.footer else "",
    ]
    return _joined(blocks) + "\n"


def render_all(documents: Sequence[Document]) -> str:
    """A table of all, then the parts of each as far as the limit of a summary goes."""
    shown = documents[:MAX_DOCUMENTS]
    rows = tuple(cells(one.title, one.status or "", one.sentence) for one in shown)
    blocks = [_table(Table(columns=columns("Checkpoint", "Result", "Findings"), rows=rows), 3)]
    size, left_out = len(blocks[0].encode()), len(documents) - len(shown)
    for document in shown:
        content = parts(document.parts)
        block = f"### {safe(document.title)}\n\n{content}" if content else ""
        size += len(block.encode())
        if size < SUMMARY_BYTES:
            blocks.append(block)
        else:
            left_out += 1
    if left_out:
        blocks.append(f"{plural(left_out, 'more checkpoint')} with findings: see --format json")
    return _joined(blocks) + "\n"


def parts(parts: Sequence[Part], level: int = 3) -> str:
    """Parts below a heading of the level above `level`; what only a page can show is left out."""
    return _joined([_DRAW[type(part)](part, level) for part in parts if type(part) in _DRAW])


def safe(text: str, limit: int = _MAX_TEXT) -> str:
    """`text` as itself in Markdown: no markup, HTML, link, mention or table cell of its own.

    The limit is for texts from outside; no sentence of a report is as long.
    """
    escaped = _PUNCTUATION.sub(r"\\\1", visible(clip(text, limit)))
    for plain, entity in _ENTITIES.items():
        escaped = escaped.replace(plain, entity)
    return escaped


def _section(section: Section, level: int) -> str:
    if "markdown" not in section.forms:
        return ""
    content = parts(section.parts, level + 1)
    return f"{'#' * level} {safe(section.title)}\n\n{content}" if section.title and content else content


def _table(table: Table, _: int) -> str:
    """The header is ours; the rows come from outside."""
    table = table.shown("markdown")
    lines = [[column.title for column in table.columns], ["---"] * len(table.columns)]
    lines += [[safe(_noted(cell), _MAX_CELL) for cell in row] for row in table.rows]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{safe(table.caption)}" if table.caption else rows


def _noted(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _facts(facts: Facts, _: int) -> str:
    return "\n".join(f"- **{safe(label)}** {safe(_noted(cell))}" for label, cell in facts.rows)


def _paragraph(paragraph: Paragraph, _: int) -> str:
    return f"**Warning** {safe(paragraph.text)}" if paragraph.style == "warning" else safe(paragraph.text)


def _listing(listing: Listing, _: int) -> str:
    prefix = f"{listing.title}: " if listing.title else ""
    return "\n".join(f"- {safe(prefix + _noted(item))}" for item in listing.items)


def _code(code: Code, _: int) -> str:
    return f"```sh\n{code.text}\n```"


def _details(details: Details, level: int) -> str:
    content = parts(details.parts, level)
    return f"<details><summary>{safe(_noted(details.summary))}</summary>\n\n{content}\n\n</details>"


def _findings(part: FindingList, level: int) -> str:
    return parts(finding_parts(part, MAX_FINDINGS), level)


def _joined(blocks: Sequence[str]) -> str:
    return "\n\n".join(block for block in blocks if block)


_DRAW: Mapping[type, Callable[..., str]] = {
    Section: _section,
    Table: _table,
    Facts: _facts,
    Paragraph: _paragraph,
    Listing: _listing,
    Code: _code,
    Details: _details,
    FindingList: _findings,
}
