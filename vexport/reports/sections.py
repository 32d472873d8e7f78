"""The reference pages `vexport/docs/*.md`, cut into sections that have names.

A page is named like its file. A section is named by its heading, by each part of a list of names
(`## NVFP4, NVFP4A16`), and by the names in a comment `<!-- explains: a, b -->` below the heading, which
renders as nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from vexport.errors import InputError
from vexport.formats.schemes import all_schemes, get_scheme, is_scheme, meant, scheme_name

_ALIASES = re.compile(r"<!-- explains: (.+?) -->\n*")
_HEADING = re.compile(r"^(#+) (.+)$")
_FENCE = "```"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading of a page with all below it, subsections included, as Markdown; depth 1 is the page."""

    page: str
    title: str
    depth: int
    names: tuple[str, ...]
    text: str


@cache
def all_sections() -> tuple[Section, ...]:
    """Every section of every page; the first section of a page is the page itself."""
    texts = {page.name: page for page in files("vexport").joinpath("docs").iterdir()}
    return tuple(
        section
        for name in sorted(texts)
        for section in _sections(name.removesuffix(".md"), texts[name].read_text(encoding="utf-8"))
    )


def contents() -> str:
    """The pages and the sections of each, one page a line."""
    pages: dict[str, list[str]] = {}
    for section in all_sections():
        pages.setdefault(section.page, []).extend([section.title] if section.depth > 1 else [])
    return "".join(f"{page}: {'; '.join(titles)}\n" for page, titles in pages.items())


def find_section(name: str) -> Section:
    """The section of a name in any case, spaces and punctuation; InputError where nothing has it.

    A scheme with arguments (W4A16_G64) has the section of its preset, or of one that is stored in its format.
    """
    by_name = {_fold(known): section for section in all_sections() for known in section.names}
    if _fold(name) not in by_name and is_scheme(scheme_name(name)):
        format_ = get_scheme(scheme_name(name)).format
        presets = (preset.name for preset in all_schemes() if preset.format is format_)
        listed = [preset for preset in presets if _fold(preset) in by_name]
        name = next((preset for preset in listed if name.upper().startswith(preset)), listed[0])
    section = by_name.get(_fold(name))
    if section is None:
        known_names = [known for section in all_sections() for known in section.names]
        raise InputError(
            f"explain {name!r}",
            got="an unknown name",
            need="a scheme, observer, rounding, check, finding, page or section",
            fix=f"run `vexport explain` to list them{meant(name, known_names)}",
        )
    return section


def _fold(name: str) -> str:
    """A name without case and punctuation: `group size`, `group-size` and `--group-size` are one."""
    return re.sub(r"[\W_]", "", name).casefold()


def _sections(page: str, text: str) -> Iterator[Section]:
    lines = text.splitlines()
    headings = list(_headings(lines))
    for number, (start, depth, title) in enumerate(headings):
        end = next((line for line, other, _ in headings[number + 1 :] if other <= depth), len(lines))
        own_end = next((line for line, *_ in headings[number + 1 :]), len(lines))
        aliases = _ALIASES.findall("\n".join(lines[start:own_end]))
        first = [page] if depth == 1 else [title] if " and " in title else title.split(", ")
        body = _ALIASES.sub("", "\n".join(lines[start:end])).strip()
        names = (*first, *(alias for listed in aliases for alias in listed.split(", ")))
        yield Section(page=page, title=title, depth=depth, names=names, text=body)


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """(line, depth, title) of each heading that is not inside a block of code."""
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.startswith(_FENCE)
        if not fenced and (heading := _HEADING.match(line)):
            yield number, len(heading[1]), heading[2]
