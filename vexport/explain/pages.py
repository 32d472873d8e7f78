"""The reference pages `vexport/docs/*.md`, cut into sections that have names.

A page is named like its file. A section is named by its heading, by each part of a list of names
(`## NVFP4, NVFP4A16`), and by the names in a comment `<!-- explains: a, b -->` below the heading, which
renders as nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# The pages in the order in which a person reads them; a test compares the list with the folder.
PAGES = (
    "installation",
    "sources",
    "quantize",
    "large",
    "schemes",
    "architectures",
    "calibration",
    "observers",
    "rounding",
    "mixed",
    "check",
    "load",
    "evaluation",
    "statistics",
    "reports",
    "repair",
    "ci",
    "scenario",
    "speed",
    "robustness",
    "troubleshooting",
    "glossary",
)
_HEADING = re.compile(r"^(#+) (.+)$")
_FENCE = "```"
_KEY = re.compile(r"^\| `([\w.]+)` \| `?(.+?)`? \| (.+) \|$", re.MULTILINE)
_ALIASES = re.compile(r"<!-- explains: (.+?) -->\n*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading of a page with the text below it, that of its subsections included; depth 1 is the page."""

    page: str
    title: str
    depth: int
    names: tuple[str, ...]
    text: str


@cache
def all_sections() -> tuple[Section, ...]:
    """Every section of every page, in order; the first section of a page is the page itself."""
    return tuple(section for page in PAGES for section in _sections(page))


def topic_names() -> tuple[str, ...]:
    """Every name that can be explained: pages, schemes, observers, checks and sections."""
    return tuple(name for section in all_sections() for name in section.names)


def find_section(name: str) -> Section | None:
    """The section that `name` names, whatever its case, spaces and punctuation; None where there is none."""
    return _by_name().get(fold(name))


def fold(name: str) -> str:
    """A name without case and punctuation: `group size`, `group-size` and `--group-size` are one."""
    return re.sub(r"[\W_]", "", name).casefold()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a scenario: a row of the tables of its page."""

    name: str
    default: str
    meaning: str


def find_key(name: str) -> Key | None:
    """The scenario's key of that name, in full (`calibration.seed`) or its last part; None without one."""
    rows = _KEY.finditer(_page_text("scenario"))
    keys = [Key(name=row[1], default=row[2], meaning=row[3]) for row in rows]
    full = (key for key in keys if fold(key.name) == fold(name))
    last = (key for key in keys if fold(key.name.rpartition(".")[2]) == fold(name))
    return next(full, next(last, None))


@cache
def _by_name() -> Mapping[str, Section]:
    return {fold(name): section for section in all_sections() for name in section.names}


def _sections(page: str) -> Iterator[Section]:
    lines = _page_text(page).splitlines()
    headings = list(_headings(lines))
    for number, (start, depth, title) in enumerate(headings):
        later = (line for line, other, _ in headings[number + 1 :] if other <= depth)
        body = "\n".join(lines[start + 1 : next(later, len(lines))])
        own = "\n".join(lines[start + 1 : next((line for line, *_ in headings[number + 1 :]), len(lines))])
        aliases = [name for listed in _ALIASES.findall(own) for name in listed.split(", ")]
        first = [page] if depth == 1 else _named(title)
        text = _ALIASES.sub("", body).strip("\n")
        yield Section(page=page, title=title, depth=depth, names=(*first, *aliases), text=text)


@cache
def _page_text(page: str) -> str:
    return files("vexport").joinpath("docs", f"{page}.md").read_text(encoding="utf-8")


def _named(title: str) -> list[str]:
    """What a heading names: each name of a list of names, else the heading as it is."""
    return [title] if " and " in title else title.split(", ")


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """(line, depth, title) of each heading that is not inside a block of code."""
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.startswith(_FENCE)
        if not fenced and (heading := _HEADING.match(line)):
            yield number, len(heading[1]), heading[2]
