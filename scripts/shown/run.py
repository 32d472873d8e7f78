"""Run the commands that the README and the pages show, and write their output into the page.

    scripts/docs [--only NEED]... [--page NAME]... [--check]

Each block of output and each table of measured numbers has a marker (`blocks.py`). A block whose
needs this machine does not meet stays as it is, and is listed. `--only demo` runs the blocks that
need nothing else, in some minutes. With `--check`, no page is written.

The exit code is 1 if a command failed, if a paragraph lacks a number that its command printed, or
with `--check` if a block would change. Numbers that depend on the machine are no change.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from blocks import PROMPT, Block, Unusable, excerpt, find_blocks, steps  # noqa: E402
from needs import NEEDS, ROOT, machine  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "vexport" / "docs").glob("*.md")))
# Exit codes of wrong input, and of an environment in which a command cannot run.
FAILURES = (2, 4, 126, 127)
COLUMNS = "100"


class Folder:
    """The folder in which the commands of a page run: paths of the checkout are in it, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for entry in ROOT.iterdir():
            if entry.name not in (".git", "runs"):
                (path / entry.name).symlink_to(entry)
        tools = path / "bin"
        tools.mkdir()
        for name, arguments in (("python", ""), ("vexport", "-m vexport")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            (tools / name).chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": COLUMNS,
        }

    def run(self, command: str) -> list[str]:
        """Return the printed lines of a command.

        Raises:
            Unusable: If the command could not do its job.
        """
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode in FAILURES:
            reason = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
            raise Unusable(f"exit code {ran.returncode} of {command}: {''.join(reason)}")
        return [line.rstrip() for line in ran.stdout.strip("\n").splitlines()]


def written(block: Block, folder: Folder) -> str:
    """Run the commands of a block, and return the block with their output.

    Raises:
        Unusable: If a command fails, or does not print what the block needs.
    """
    printed: list[str] = []
    for command in block.commands:
        printed = folder.run(command)
    if block.kind == "transcript":
        return _transcript(block, folder)
    if block.kind == "table":
        if not printed or not printed[0].startswith("|"):
            raise Unusable(f"no table in: {' '.join(printed)[:80]}")
        return "\n".join(printed)
    folded = " ".join(block.text.split())
    missing = [line for line in printed if " ".join(line.split()) not in folded]
    if missing or not printed:
        raise Unusable(f"not in the paragraph: {'; '.join(missing) or 'no output'}")
    return block.text


def _transcript(block: Block, folder: Folder) -> str:
    first, *lines, last = block.text.splitlines()
    result = [first]
    for step in steps(lines):
        blank = [line for line in step.output[-1:] if not line]
        shown = [*step.output[: len(step.output) - len(blank)]]
        result += [f"{PROMPT}{step.command}"]
        result += excerpt(shown, folder.run(step.command), block.may_differ)
        result += blank
    return "\n".join([*result, last])


def run_page(page: Path, chosen: Sequence[str], *, is_check: bool) -> bool:
    """Run the blocks of a page and print a line for each. Return True if all are as they should."""
    text = page.read_text(encoding="utf-8")
    new = text
    is_good = True
    shift = 0
    with tempfile.TemporaryDirectory(prefix="vexport-docs-") as name:
        folder = Folder(Path(name))
        for block in find_blocks(text):
            state = "same"
            missing = [need for need in block.needs if need not in chosen]
            try:
                content = block.text if missing else written(block, folder)
            except Unusable as problem:
                content, state, is_good = block.text, f"FAILED: {problem}", False
            if missing:
                state = f"not run: needs {', '.join(missing)}"
            elif not block.same(content):
                state = "changed"
                is_good &= not is_check
                old = slice(block.marker.start() + shift, block.end + shift)
                between = text[block.marker.end() : block.start]
                replacement = block.stamped(f"{machine()}, {commit()}") + between + content
                shift += len(replacement) - (old.stop - old.start)
                new = new[: old.start] + replacement + new[old.stop :]
            line = text.count("\n", 0, block.start) + 1
            print(f"{page.relative_to(ROOT)}:{line}  {state}", flush=True)
            if state == "changed" and is_check:
                print(content)
    if not is_check and new != text:
        page.write_text(new, encoding="utf-8")
    return is_good


def commit() -> str:
    """Return the commit of the checkout."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def usable(only: Iterable[str]) -> list[str]:
    """Return the chosen needs that this machine meets."""
    return [need for need, (_, is_met) in NEEDS.items() if need in (only or NEEDS) and is_met()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=NEEDS,
        metavar="NEED",
        help="run blocks with no other need: "
        + ", ".join(f"{n} ({w})" for n, (w, _) in NEEDS.items()),
    )
    parser.add_argument(
        "--page", action="append", default=[], choices=[page.stem for page in PAGES], metavar="NAME"
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    chosen = usable(given.only)
    pages = [page for page in PAGES if not given.page or page.stem in given.page]
    results = [run_page(page, chosen, is_check=given.check) for page in pages]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
