"""Render Markdown for reports, CI step summaries and model cards."""

import re
from collections.abc import Iterable, Sequence

from vexport.errors import visible
from vexport.reports import document as doc
from vexport.reports.document import finding_parts, table
from vexport.reports.formatting import capitalized
from vexport.words import clip, plural

# GitHub refuses a step's summary above 1 MiB. This leaves space for other commands of the step.
SUMMARY_BYTES = 1 << 19
MAX_FINDINGS = 20
_MAX_CELL = 600
_MAX_TEXT = 4000
_PUNCTUATION = re.compile(r"([\\`*_\[\]|~#{}!])")
_ENTITIES = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "@": "&#64;",
    "://": "&#58;//",
    "www.": "www&#46;",
}


def render(document: doc.Document) -> str:
    """Return a document as Markdown."""
    status = f"{safe(document.outcome)}: " if document.status else ""
    rows = [(gate.name, gate.status, gate.summary) for gate in document.gates]
    blocks = [
        f"## {status}{safe(document.title)}",
        safe(document.reason),
        safe(capitalized(document.sentence)) if document.sentence else "",
        *(f"**Warning** {safe(text)}" for text in document.warnings),
        _table(table(("Gate", "Result", "Why"), rows)) if rows else "",
        render_parts(document.parts),
        f"<sub>{safe(document.footer)}</sub>" if document.footer else "",
    ]
    return _join_blocks(blocks) + "\n"


def render_all(documents: Sequence[doc.Document]) -> str:
    """Return a table of all documents, then the parts of each document.

    Parts beyond the size limit of a step summary are left out and counted.
    """
    rows = (
        (
            document.title,
            document.outcome,
            "; ".join(filter(None, (document.reason, document.sentence))),
        )
        for document in documents
    )
    blocks = [_table(table(("Checkpoint", "Result", "Findings"), rows))]
    size, left_out = len(blocks[0].encode()), 0
    for document in documents:
        content = render_parts(document.parts)
        block = f"### {safe(document.title)}\n\n{content}" if content else ""
        size += len(block.encode())
        if size < SUMMARY_BYTES:
            blocks.append(block)
        elif block:
            left_out += 1
    if left_out:
        blocks.append(f"{plural(left_out, 'more checkpoint')} with findings: see --format json")
    return _join_blocks(blocks) + "\n"


def render_parts(parts: Iterable[doc.Part], level: int = 3) -> str:
    """Return the parts. The headings of their sections have the level `level`.

    Parts for a page only are left out.
    """
    return _join_blocks([_render(part, level) for part in parts])


def _render(part: doc.Part, level: int) -> str:
    match part:
        case doc.Section() if "markdown" in part.forms:
            content = render_parts(part.parts, level + 1)
            return (
                f"{'#' * level} {safe(part.title)}\n\n{content}"
                if part.title and content
                else content
            )
        case doc.Table():
            return _table(part)
        case doc.Facts():
            return "\n".join(
                f"- **{safe(label)}** {safe(_cell_with_note(cell))}" for label, cell in part.rows
            )
        case doc.Paragraph():
            if part.style == "code":
                return f"```sh\n{part.text}\n```"
            return f"**Warning** {safe(part.text)}" if part.style == "warning" else safe(part.text)
        case doc.Listing():
            prefix = f"{part.title}: " if part.title else ""
            return "\n".join(f"- {safe(prefix + _cell_with_note(item))}" for item in part.items)
        case doc.Details():
            content = render_parts(part.parts, level)
            summary = safe(_cell_with_note(part.summary))
            return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"
        case doc.FindingList():
            return render_parts(finding_parts(part, MAX_FINDINGS), level)
    return ""


def safe(text: str, limit: int = _MAX_TEXT) -> str:
    """Return `text` escaped for Markdown: no markup, HTML, link, mention or table cell.

    Longer texts are cut. Only texts from outside, such as prompts, are that long.
    """
    escaped = _PUNCTUATION.sub(r"\\\1", visible(clip(text, limit)))
    for plain, entity in _ENTITIES.items():
        escaped = escaped.replace(plain, entity)
    return escaped


def _table(table: doc.Table) -> str:
    """Return a table. The header is escaped like the cells, because it may contain task names."""
    table = table.shown("markdown")
    lines = [
        [safe(column.title, _MAX_CELL) for column in table.columns],
        ["---"] * len(table.columns),
    ]
    lines += [[safe(_cell_with_note(cell), _MAX_CELL) for cell in row] for row in table.rows]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{rows}\n\n{safe(table.caption)}" if table.caption else rows


def _cell_with_note(cell: doc.TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _join_blocks(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block)
