"""Blocks of a page that a command has printed, and the marker before each of them.

A marker is an HTML comment directly before a block. Markdown and `vexport explain` do not show it:

    <!-- run: demo; may differ: memory; on: 2 CPU cores, 1a2b3c4d
    $ a command that the page does not show
    -->

- `run` lists the needs of the block (`needs.py`).
- `may differ` lists words. A line with such a word depends on the machine, and so does every number
  with a unit of time.
- `on` has the machine and the commit on which the block was last written.

The block is one of these:

- A fenced block of the language `console`: lines that begin with `$ ` are commands, and the lines
  below are their output. A line `...` stands for lines that are left out.
- A table: the last command of the marker prints it.
- A paragraph: each line that the last command of the marker prints is a part of the paragraph.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

MARKER = re.compile(r"<!-- run: (?P<head>.*?)(?:\n(?P<commands>.*?)\n?)? *-->\n", re.DOTALL)
PROMPT = "$ "
CUT = "..."
_FENCE = "```"
_NUMBER = r"[-+]?\d[\d,]*(?:[.]\d+)?(?:e-?\d+)?"
_TIME = re.compile(rf"{_NUMBER} ?(?:ms|s|min|h|seconds?|minutes?|hours?)\b")
# Spaces and lines of a table depend on the width of its numbers.
_LAYOUT = re.compile(r"[ ─-]{2,}")


class Unusable(Exception):
    """A block cannot be written. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A marker and its block. `start` and `end` are the bounds of the block in the page's text."""

    marker: re.Match[str]
    start: int
    end: int
    text: str

    @property
    def fields(self) -> dict[str, str]:
        parts = f"run: {self.marker['head']}".split(";")
        return {name.strip(): value.strip() for name, _, value in (p.partition(":") for p in parts)}

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.fields["run"].replace(",", " ").split())

    @property
    def may_differ(self) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.fields.get("may differ", "").split(",") if word)

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands that run before the block, and that the page does not show."""
        lines = (self.marker["commands"] or "").splitlines()
        return tuple(step.command for step in steps(lines))

    @property
    def kind(self) -> str:
        if self.text.startswith(f"{_FENCE}console\n"):
            return "transcript"
        return "table" if self.text.startswith("|") else "paragraph"

    def same(self, new: str) -> bool:
        """Return True if the block differs from `new` only in numbers that may differ."""
        return masked(self.text, self.may_differ) == masked(new, self.may_differ)

    def stamped(self, where: str) -> str:
        """Return the marker with the machine and the commit of this call."""
        head = re.sub(r";\s*on: [^;]*", "", self.marker["head"]).strip()
        commands = f"\n{self.marker['commands']}\n" if self.marker["commands"] else " "
        return f"<!-- run: {head}; on: {where}{commands}-->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command with the lines below it."""

    command: str
    output: tuple[str, ...]


def find_blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, from top to bottom."""
    for marker in MARKER.finditer(page):
        start = marker.end() + len(page[marker.end() :]) - len(page[marker.end() :].lstrip("\n"))
        end = start + len(_block_at(page[start:]))
        yield Block(marker=marker, start=start, end=end, text=page[start:end])


def _block_at(text: str) -> str:
    """Return the fenced block, or the lines up to a blank line, with which a text begins."""
    pattern = rf"{_FENCE}.*?\n{_FENCE}(?=\n|$)" if text.startswith(_FENCE) else r".*?(?=\n\n|\n?$)"
    found = re.match(pattern, text, re.DOTALL)
    return found[0] if found else ""


def steps(lines: Iterable[str]) -> list[Step]:
    """Split a transcript at its commands.

    A command goes on after a backslash, and up to the end of a here-document.
    """
    found: list[tuple[list[str], list[str]]] = []
    open_until: str | None = None
    for line in lines:
        if line.startswith(PROMPT):
            found.append(([line.removeprefix(PROMPT)], []))
            document = re.search(r"<<(\w+)", line)
            open_until = document[1] if document else None
        elif not found:
            raise Unusable(f"does not begin with a command: {line}")
        elif open_until or found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
            open_until = None if line == open_until else open_until
        else:
            found[-1][1].append(line)
    return [Step(command="\n".join(command), output=tuple(out)) for command, out in found]


def masked(text: str, words: Sequence[str]) -> str:
    """Return the text without what depends on the machine, and without its layout."""
    lines = []
    for line in text.splitlines():
        line = _TIME.sub("# s", line)
        named = [word for word in words if word in line]
        lines.append(named[0] if named else _LAYOUT.sub(" ", line).rstrip())
    return "\n".join(lines)


def excerpt(shown: Sequence[str], printed: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the part of printed lines that a page shows.

    After a line `...`, the page goes on at the line that equals its next line. Before a line `...`,
    it shows as many lines as before. Without such a line, it shows everything.

    Raises:
        Unusable: If no printed line equals the line after `...`.
    """
    result: list[str] = []
    left_shown = list(shown)
    left = list(printed)
    while left_shown:
        part = list(takewhile(lambda line: line.strip() != CUT, left_shown))
        is_cut = len(part) < len(left_shown)
        taken = left[: len(part)] if is_cut else left
        result += taken
        left = left[len(taken) :]
        if not is_cut:
            return result
        result.append(left_shown[len(part)])
        left_shown = left_shown[len(part) + 1 :]
        if left_shown:
            wanted = masked(left_shown[0], words)
            places = [at for at, line in enumerate(left) if masked(line, words) == wanted]
            if not places:
                raise Unusable(f"no line like: {left_shown[0]}")
            left = left[places[0] :]
    return result or list(printed)
