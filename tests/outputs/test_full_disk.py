"""A full disk is one line with the place, and exit code 4, whatever was being written."""

import resource
from pathlib import Path

import pytest

from tests.command import vexport
from tests.forked import command, start
from tests.models import Good
from vexport.run.directory import logged_to


def limited(largest: int, *arguments: object) -> None:
    """Run a command; the system cuts files at `largest` bytes (EFBIG)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    command(*arguments)


def test_an_answer_on_a_full_device() -> None:
    ran = vexport("list", "schemes", "-o", "/dev/full")
    (line,) = ran.errors
    assert ran.code == 4
    assert line.startswith("error: /dev/full: No space left")


@pytest.mark.parametrize("case", ["check -o", "plan -o", "report of repair", "repair", "demo"])
def test_an_output_on_a_full_disk(case: str, good: Good, llama: Path, tmp_path: Path) -> None:
    quantized, out, log = good("W4A16"), tmp_path / "out", tmp_path / "log"
    cases: dict[str, tuple[object, ...]] = {
        "check -o": ("check", quantized, "--static", "--format", "json", "-o", out),
        "plan -o": ("plan", llama, "--scheme", "W4A16", "--format", "json", "-o", out),
        "report of repair": ("repair", quantized, tmp_path / "made", "--format", "json", "-o", out),
        "repair": ("repair", quantized, out),
        "demo": ("demo", out),
    }
    sizes = {"repair": 10_000, "demo": 100_000, "report of repair": 10_000}
    process = start(log, limited, sizes.get(case, 100), *cases[case], "--quiet")
    process.join(100)
    text = log.read_text()
    assert process.exitcode == 4, text
    assert "Traceback" not in text
    assert str(tmp_path) in text  # the place that is written, not the source of a copy
    assert not out.exists()


def test_a_log_on_a_full_disk_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command continues. It reports other failed writes itself."""
    monkeypatch.setattr("vexport.run.directory.LOG_FILE", "full.log")
    (tmp_path / "full.log").symlink_to("/dev/full")
    with logged_to(tmp_path):
        pass
    assert capfd.readouterr().err == ""
