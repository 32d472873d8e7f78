"""Explanations as text for a terminal, or as JSON."""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from vexport.explain.catalog import CATALOGS, table_text
from vexport.explain.entries import TABLES, Entry
from vexport.explain.pages import PAGES, all_sections

WIDTH = 100
_AFTER_HEADING = re.compile(r"^(#+ .+)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def render_entry(entry: Entry, format_: str) -> str:
    """One explanation: facts, then the text of its section."""
    if format_ == "json":
        return json.dumps(asdict(entry), indent=2) + "\n"
    return "\n".join(_lines(entry)) + "\n"


def render_topics(format_: str) -> str:
    """Every name that can be explained: those of the tables, and each page with its sections."""
    tables = {table: [next(iter(row.values())) for row in CATALOGS[table]()] for table in (*TABLES, "checks")}
    listed = {name for names in tables.values() for name in names}
    pages: dict[str, list[str]] = {page: [] for page in PAGES}
    for section in all_sections():
        if section.depth > 1 and not listed & set(section.names):
            pages[section.page].append(section.title)
    if format_ == "json":
        return json.dumps({**tables, "pages": pages}, indent=2) + "\n"
    lines = [line for title, names in tables.items() for line in _row(title, ", ".join(names))]
    lines += ["", "pages, and what stands in them:"]
    lines += [line for page, titles in pages.items() for line in _row(page, "; ".join(titles))]
    return "\n".join([*lines, "", "vexport explain NAME explains each."]) + "\n"


def _lines(entry: Entry) -> Iterator[str]:
    heading = f": {entry.title}" if entry.kind == "topic" and entry.title != entry.name else ""
    yield f"{entry.name} ({entry.kind}){heading}"
    if entry.facts:
        yield ""
        for name, fact in entry.facts.items():
            yield from _row(name, fact, indent=2)
    yield ""
    yield plain(entry.text)
    if entry.page and entry.kind != "page":
        yield f"\nMore: vexport explain {entry.page}"


def _row(name: str, text: str, *, indent: int = 0) -> Iterator[str]:
    """`name  text`, the text wrapped in its own column."""
    head = " " * indent + name.ljust(18)
    yield from textwrap.wrap(
        text or "-",
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(markdown: str) -> str:
    """Markdown as a person reads it in a terminal: no links, no bold, no fences, tables in columns.

    Blocks of code keep their lines.
    """
    text = _LINK.sub(r"\1", _AFTER_HEADING.sub(r"\1\n\n", markdown)).replace("**", "")
    blocks, code = [], False
    for block in text.split("\n\n"):
        code ^= block.count("```") % 2 == 1
        kept = code or block.startswith(("    ", "#", "```")) or block.endswith("```")
        blocks.append(
            _unfenced(block) if kept else _table(block) if block.startswith("|") else _wrapped(block)
        )
    return "\n\n".join(blocks)


def _table(block: str) -> str:
    """A table of Markdown in columns."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines()]
    return table_text(rows[0], rows[2:], WIDTH).rstrip()


def _unfenced(block: str) -> str:
    return "\n".join(line for line in block.splitlines() if not line.startswith("```"))


def _wrapped(block: str) -> str:
    """A paragraph, or the items of a list, at WIDTH columns."""
    items = re.split(r"\n(?=- )", block)
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            WIDTH,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )
