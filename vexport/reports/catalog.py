"""Render the tables of `vexport list`, and find the sections of the reference for `explain`."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

from vexport.errors import InputError
from vexport.formats.arguments import QuantArgs
from vexport.formats.base import GpuSupport
from vexport.formats.gpus import GENERATIONS, find_card
from vexport.formats.schemes import all_schemes, get_scheme, is_scheme, scheme_hint, scheme_name
from vexport.plan.rules import text_use
from vexport.records.calibration import SUMMARIES
from vexport.records.observer_names import OBSERVERS
from vexport.reports import document as doc
from vexport.reports.renderers.text import WIDTH, render
from vexport.rules import usage

Rows = Sequence[Mapping[str, str]]


def render_catalog(rows: Rows, format_: str, width: int = WIDTH, caption: str = "") -> str:
    """Return a table with a caption as text of `width` columns, or as a JSON list of objects."""
    if format_ == "json":
        return json.dumps(list(rows), indent=2) + "\n"
    table = doc.table(tuple(rows[0]), (row.values() for row in rows), caption)
    return render([doc.Document(title="", parts=(table,))], width)


def schemes() -> Rows:
    """Return bits, formats and supported devices of each scheme."""
    return [
        {
            "scheme": scheme.name,
            "weights": _args(scheme.args.weights),
            "inputs": _args(scheme.args.input_activations),
            "calibration": text_use([scheme], needed=scheme.args.calibrated),
            "format": scheme.format.name,
            **_gpus(scheme.format.gpu_support(scheme.args)),
            "vLLM on CPU": scheme.format.cpu(scheme.args),
        }
        for scheme in all_schemes()
    ]


def observers() -> Rows:
    """Return the name, the class and a summary of each observer."""
    return [
        {"observer": name, "class": known.kind, "what it does": known.summary}
        for name, known in OBSERVERS.items()
    ]


def roundings() -> Rows:
    """Return the names and summaries of roundings."""
    return [{"rounding": name, "what it does": summary} for name, summary in SUMMARIES.items()]


def checks() -> Rows:
    """Return the names and subjects of checks."""
    from vexport.checks import CHECKS, FILES, SOURCE, SOURCE_DESCRIPTION

    descriptions = {
        FILES: "folder, config.json, index and safetensors headers can be read",
        **{name: check.description for name, check in CHECKS.items()},
        SOURCE: SOURCE_DESCRIPTION,
    }
    return [
        {"check": name, "what is looked at": description}
        for name, description in descriptions.items()
    ]


def architectures() -> Rows:
    """Return the model classes, the backend that runs each class in vLLM, and the fused layers."""
    from vexport.architectures import architecture_table

    return [
        {
            "architecture": name,
            "code": entry.backend or "vLLM",
            "fused": "; ".join(
                f"{fused} = {' + '.join(members)}" for fused, members in entry.fused.items()
            )
            or "nothing",
        }
        for name, entry in architecture_table().architectures.items()
    ]


def _gpus(support: GpuSupport) -> dict[str, str]:
    """Return two ranges of compute capabilities, with the titles of their columns.

    GPUs in the first range load the scheme. GPUs in the second range compute in the stored
    precision.
    """
    return {
        "loads from SM": _span(support.loads_from, support.loads_below),
        "native from SM": _span(support.full_from, support.full_below),
    }


def _span(least: int | None, below: int | None) -> str:
    return "none" if least is None else f"{least}, below {below}" if below else str(least)


def _args(args: QuantArgs | None) -> str:
    if args is None:
        return "16 bit"
    kind = "FP" if args.is_float else "INT"
    size = f" {args.group_size}" if args.group_size else ""
    if args.block:
        size = " {} x {}".format(*args.block)
    zero = "" if args.symmetric else ", zero points"
    dynamic = {True: ", dynamic", "local": ", groups dynamic"}.get(args.dynamic, "")
    return f"{kind}{args.num_bits} {args.strategy}{size}{zero}{dynamic}"


CATALOGS: Mapping[str, Callable[[], Rows]] = {
    "schemes": schemes,
    "observers": observers,
    "roundings": roundings,
    "checks": checks,
    "architectures": architectures,
}


# Name of the section to which names of GPUs lead.
GPU_SECTION = "GPUs"
RULE_BOOK = "rulebook"
MOST_NEAREST = 3
_ALIASES = re.compile(r"<!-- explains: (.+?) -->")
# Comments are for `explain` and for scripts, and are not shown.
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$")
_FENCE = "```"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection:
    """Section of a page in Markdown: a heading with everything below it.

    `depth` is the level of the heading. The whole page is a section with depth 1. `names` are the
    names by which `vexport explain` finds the section.
    """

    page: str
    title: str
    depth: int
    names: tuple[str, ...]
    text: str


@cache
def all_sections() -> tuple[ReferenceSection, ...]:
    """Return every section of every page. The first section of a page is the page itself."""
    texts = {page.name: page for page in files("vexport").joinpath("docs").iterdir()}
    return tuple(
        section
        for name in sorted(texts)
        for section in _sections(name.removesuffix(".md"), texts[name].read_text(encoding="utf-8"))
    )


def render_contents(sections: Sequence[ReferenceSection], format_: str) -> str:
    """Return the titles of sections as text, one page per line, or the sections as a JSON list."""
    if format_ == "json":
        return json.dumps([asdict(section) for section in sections], indent=2) + "\n"
    pages: dict[str, list[str]] = {}
    for section in sections:
        titles = pages.setdefault(section.page, [])
        if section.depth > 1:
            titles.append(section.title)
    return "".join(f"{page}: {'; '.join(titles)}\n" for page, titles in pages.items())


def render_section(section: ReferenceSection, format_: str) -> str:
    """Return a section as Markdown, or as a JSON object."""
    if format_ == "json":
        return json.dumps(asdict(section), indent=2) + "\n"
    return section.text + "\n"


def find_section(name: str) -> ReferenceSection:
    """Return the section with this name. Case is ignored.

    If no section has exactly this name, spaces and punctuation are ignored, too.

    For a scheme with arguments (W4A16_G64), return the section of its preset, or of another preset
    in the same format. For a GPU or its generation, return the section on GPUs. Otherwise, return
    the only section with these words in its heading or names.

    Raises:
        InputError: If no section is found. The error names the nearest sections.
    """
    for exact in all_sections():
        if name.casefold() in map(str.casefold, exact.names):
            return exact
    by_name = {_fold(known): section for section in all_sections() for known in section.names}
    if _fold(name) not in by_name and is_scheme(scheme_name(name)):
        format_ = get_scheme(scheme_name(name)).format
        presets = (preset.name for preset in all_schemes() if preset.format is format_)
        listed = [preset for preset in presets if _fold(preset) in by_name]
        name = next((preset for preset in listed if name.upper().startswith(preset)), listed[0])
    if _fold(name) not in by_name and (find_card(name) or name.title() in GENERATIONS.values()):
        name = GPU_SECTION
    section = by_name.get(_fold(name))
    if section is None:
        nearest = _nearest_sections(name)
        in_heading = [each for each, is_in_heading in nearest if is_in_heading]
        if len(in_heading) == 1:
            return in_heading[0]
        titles = [f"`{each.names[0]}`" for each, _ in nearest[:MOST_NEAREST]]
        known_names = [known for each in all_sections() for known in each.names]
        hint = f" (nearest: {', '.join(titles)})" if titles else scheme_hint(name, known_names)
        raise InputError.of(usage.UNKNOWN_NAME, f"explain {name!r}", hint=hint)
    return section


def _nearest_sections(name: str) -> list[tuple[ReferenceSection, bool]]:
    """Return the sections that contain all words of a name, and whether their names contain them.

    Sections whose heading or names contain the words come first, then those that mention them most
    often for their length. The rule book is left out: its sections are found by the IDs of rules.
    """
    words = [word.removesuffix("s") for word in re.findall(r"\w+", name.casefold())]
    found = []
    for section in all_sections():
        body = section.text.casefold()
        title = " ".join((section.page, section.title, *section.names)).casefold()
        if section.page != RULE_BOOK and words and all(word in title + body for word in words):
            often = sum(map(body.count, words)) / math.sqrt(len(body))
            found.append((all(word in title for word in words), often, section))
    found.sort(key=lambda each: each[:2], reverse=True)
    return [(section, is_in_heading) for is_in_heading, _, section in found]


def _fold(name: str) -> str:
    """Return a name without case and punctuation.

    `group size`, `group-size` and `--group-size` become the same.
    """
    return re.sub(r"[\W_]", "", name).casefold()


def _sections(page: str, text: str) -> Iterator[ReferenceSection]:
    lines = text.splitlines()
    headings = list(_headings(lines))
    for number, (start, depth, title) in enumerate(headings):
        end = next(
            (line for line, other, _ in headings[number + 1 :] if other <= depth), len(lines)
        )
        own_end = next((line for line, *_ in headings[number + 1 :]), len(lines))
        aliases = _ALIASES.findall("\n".join(lines[start:own_end]))
        first = [page] if depth == 1 else [title] if " and " in title else title.split(", ")
        body = _COMMENT.sub("", "\n".join(lines[start:end])).strip()
        names = (*first, *(alias for listed in aliases for alias in listed.split(", ")))
        yield ReferenceSection(page=page, title=title, depth=depth, names=names, text=body)


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (line, depth, title) of each heading outside code blocks."""
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.startswith(_FENCE)
        if not fenced and (heading := _HEADING.match(line)):
            yield number, len(heading[1]), heading[2]
