"""Width of text reports: the terminal's, and 100 columns for files and pipes."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.reports import sample
from vexport.cli.scenario import report as command
from vexport.files import to_json
from vexport.records import CheckReport, Finding
from vexport.reports import catalog, render
from vexport.reports import document as doc
from vexport.reports.checkpoints import check_documents
from vexport.reports.renderers import text
from vexport.reports.renderers.text import MAX_WIDTH, WIDTH
from vexport.run.directory import REPORT_FILE


@pytest.mark.parametrize("width", [80, 100, 120])
def test_text_fits_width(width: int) -> None:
    lines = render(sample.full(), "text", width=width).splitlines()
    assert [line for line in lines if len(line) > width] == []
    words = {word for line in lines for word in re.findall(r"\(exact_match\)|addition", line)}
    assert words == {"(exact_match)", "addition"}, "table cells break between words"


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (80, 80), (400, MAX_WIDTH)])
def test_terminal_sets_width(columns: int, width: int, folder: Path) -> None:
    assert width - 12 < printed_width(folder, columns) <= width


LONG = "/home/ci/builds/group/project/checkpoints/qwen3-30b-a3b-instruct-nvfp4/config.json"
UNBROKEN = (
    "[4096, 11008]",
    "8 bits",
    "vLLM 0.32",
    "group_size 128",
    "140 GB",
    "SM 100",
    "[dry load]",
)


@pytest.mark.parametrize("width", range(60, 121, 5))
def test_findings_break_between_words(width: int) -> None:
    """Long paths stay whole, because users copy them. So do shapes and numbers with units."""
    got = (
        "scales of shape [4096, 11008] with weights of 8 bits in vLLM 0.32, group_size 128, 140 GB"
    )
    finding = Finding(
        check="dry load",
        severity="error",
        where=f"{LONG}: quantization_config.config_groups.group_0 (tp 2, SM 100)",
        got=got,
        expected=f"a file other than {LONG}",
        fix=f"vexport check {LONG} --sm 90",
    )
    report = CheckReport(checkpoint=LONG, ok=False, findings=(finding,))
    lines = text.render(check_documents([report]), width).splitlines()
    printed = "\n".join(lines)
    assert printed.count(LONG) == 4
    assert all(part in printed for part in UNBROKEN)
    assert all(LONG in line for line in lines if len(line) > width)
    labels = [line.split()[0] for line in lines if re.match(r"\w|  \w", line)]
    assert labels[-4:] == ["error", "got", "need", "do"]


def test_wide_table_becomes_list() -> None:
    """Names are not cut off. At the width of a pipe, the same table fits."""
    schemes = catalog.schemes()
    formats = {row["format"] for row in schemes}
    for width in (80, 100, 120):
        shown = catalog.render_catalog(schemes, "text", width)
        assert max(map(len, shown.splitlines())) <= width
        assert formats <= set(shown.split())
        assert ("\n  format " in shown) == (width < 120)


def test_pipe_has_default_width(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command([str(folder)], standalone_mode=False)
    lines = capfd.readouterr().out.splitlines()
    assert WIDTH - 12 < max(map(len, lines)) <= WIDTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run directory with a report of a failed run."""
    found = sample.full()
    (tmp_path / REPORT_FILE).write_text(to_json(found))
    return tmp_path


def printed_width(folder: Path, columns: int) -> int:
    """Return the length of the longest line that the command prints on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.environ.pop("COLUMNS", None)
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", "vexport", "report", str(folder)],
            {**os.environ, "NO_COLOR": "1"},
        )
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    os.waitpid(pid, 0)
    return max(len(line) for line in output.decode().splitlines())


def test_paragraph_keeps_words_whole() -> None:
    path = "/home/" + "a" * 100
    parts = (doc.Paragraph(f"see {path}"), doc.Paragraph("many words " * 20, style="warning"))
    lines = text.render([doc.Document(title="t", parts=parts)], 60).splitlines()
    assert path in lines
    indents = [line.startswith(" " * len("warning  ")) for line in lines if "words" in line]
    assert indents == [False, *[True] * (len(indents) - 1)]
