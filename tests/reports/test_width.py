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
from vexport.reports import render
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
