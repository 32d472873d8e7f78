"""Each output and each measured number of a page comes from a command that `scripts/docs` runs."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.command import ROOT
from vexport.reports.catalog import all_sections

PAGES = (ROOT / "README.md", *sorted((ROOT / "vexport" / "docs").glob("*.md")))
# scripts/generate_settings.py and scripts/generate_rules.py write these pages' tables.
CHECKED = [path for path in PAGES if path.stem not in ("scenario", "rulebook")]
ONCE = re.compile(r"\b(measured|recorded|ran)\s+once\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts" / "shown"))
    import blocks

    return blocks


@pytest.mark.slow
@pytest.mark.vllm
def test_demo_blocks_change_nothing_but_times() -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/shown/run.py", "--only", "demo", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "README.md:7  same" in ran.stdout


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: path.stem)
def test_outputs_and_numbers_have_a_source(path: Path, blocks: ModuleType) -> None:
    """Outputs and tables with numbers have a marker, a comment with a file, or "measured once".

    Outputs are fenced blocks, so indented blocks have commands or rows of JSON.
    """
    text = path.read_text(encoding="utf-8")
    shown = {block.start for block in blocks.find_blocks(text)}
    parts = paragraphs(text)
    for (_, before), (start, part), (_, after) in zip(
        [(0, ""), *parts], parts, [*parts[1:], (0, "")], strict=False
    ):
        if start not in shown and not ONCE.search(f"{before} {after}"):
            assert not re.match(r"```(console)?\n", part), part
            assert not is_measured(part) or names_a_file(text[:start]), part
            assert not part.startswith("    ") or is_commands(part), part


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Return the parts between blank lines, with their places. A fenced block is one part."""
    visible = re.sub(r"<!--.*?-->", lambda found: "\0" * len(found[0]), text, flags=re.DOTALL)
    pattern = r"(?ms)^```.*?^```$|^[^\n\0].*?(?=\n\n|\n?\Z)"
    return [(found.start(), found[0]) for found in re.finditer(pattern, visible)]


def is_measured(part: str) -> bool:
    """Return True for a table with a number at the start of a cell, after the first column."""
    rows = [line.strip("| ").split("|") for line in part.splitlines() if line.startswith("|")]
    cells = (cell.strip(" *`~") for row in rows[2:] for cell in row[1:])
    return any(re.match(r"[-+.]?\d", cell) for cell in cells)


def names_a_file(before: str) -> bool:
    """Return True if a text ends with a comment that names a file of the repository."""
    comment = re.search(r"<!--((?:(?!-->).)*)-->\s*$", before, re.DOTALL)
    return comment is not None and any((ROOT / word).is_file() for word in comment[1].split())


def is_commands(part: str) -> bool:
    """Return True if each line looks like a call: no columns, and a program's name first."""
    lines = (re.split(r"\s+#", line)[0] for line in re.sub(r"\\\n *", "", part).splitlines())
    calls = [line.strip() for line in lines if line.strip()]
    return all(
        re.match(r"(\w+=\S+ )*([a-z./][\w./-]*( \S|$)|{)", line) and "  " not in line
        for line in calls
    )


PAGE = r"""# Page

<!-- run: demo, gpu; may differ: memory; on: 2 CPU cores, abc
$ vexport demo
-->
```console
$ vexport plan \
  MODEL
size 5
...
memory 7

$ cat <<END
a
END
a
```

<!-- run: hours -->

| a |
|---|
| 1 |

Text.
"""


def test_blocks_are_found_and_rewritten(blocks: ModuleType) -> None:
    console, table = blocks.find_blocks(PAGE)
    assert (console.kind, console.needs) == ("transcript", ("demo", "gpu"))
    assert (console.commands, console.may_differ) == (("vexport demo",), ("memory",))
    assert console.stamped("4 CPU cores, def").startswith(
        "<!-- run: demo, gpu; may differ: memory; on: 4 CPU cores, def\n$ vexport demo\n-->\n"
    )
    first, second = blocks.steps(console.text.splitlines()[1:-1])
    assert first.command == "vexport plan \\\n  MODEL"
    assert (second.command, second.output) == ("cat <<END\na\nEND", ("a",))
    assert (table.kind, table.text, table.needs) == ("table", "| a |\n|---|\n| 1 |", ("hours",))
    assert table.stamped("here") == "<!-- run: hours; on: here -->\n"


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("took 3 s, 1.5 minutes", "took 41 s, 12 minutes", True),
        ("took 3 s of 4", "took 3 s of 5", False),
        ("memory 5 MB, 7", "memory 6 MB, 8", True),
        ("size 5 MB", "size 6 MB", False),
        ("time   7 s\n──────────", "time  17 s\n───────────", True),
    ],
)
def test_only_times_and_named_lines_may_differ(
    blocks: ModuleType, old: str, new: str, is_same: bool
) -> None:
    assert (blocks.masked(old, ["memory"]) == blocks.masked(new, ["memory"])) is is_same


def test_explain_shows_no_marker() -> None:
    assert [section.title for section in all_sections() if "<!--" in section.text] == []


def test_excerpts(blocks: ModuleType) -> None:
    printed = ["a", "b 1 s", "c", "d", "e"]
    assert blocks.excerpt(["x"], printed, ()) == printed
    assert blocks.excerpt(["x", "..."], printed, ()) == ["a", "..."]
    assert blocks.excerpt(["...", "b 2 s", "x", "..."], printed, ()) == ["...", "b 1 s", "c", "..."]
    assert blocks.excerpt(["x", "...", "d"], printed, ()) == ["a", "...", "d", "e"]
    with pytest.raises(blocks.Unusable, match="no line like: z"):
        blocks.excerpt(["...", "z"], printed, ())
