"""A full disk causes one line with the place, and exit code 4, for each kind of output."""

import resource
from pathlib import Path

import pytest

from tests.command import vexport
from tests.forked import command, start
from tests.models import Good
from vexport.run.directory import logged_to


def limited(largest: int, *arguments: object) -> None:
    """Run a command. The system refuses bytes of files after `largest` (EFBIG)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    command(*arguments)


def test_full_device_is_one_line() -> None:
    ran = vexport("list", "schemes", "-o", "/dev/full")
    (line,) = ran.errors
    assert ran.code == 4
    assert line.startswith("error: /dev/full: No space left")


@pytest.mark.parametrize("case", ["check -o", "plan -o", "report of repair", "repair", "demo"])
def test_full_disk_is_one_line(case: str, good: Good, llama: Path, tmp_path: Path) -> None:
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
    assert str(tmp_path) in text  # the written path, not the source of a copy
    assert not out.exists()


def test_full_disk_of_log_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A log that cannot be written does not affect the command."""
    monkeypatch.setattr("vexport.run.directory.LOG_FILE", "full.log")
    (tmp_path / "full.log").symlink_to("/dev/full")
    with logged_to(tmp_path):
        pass
    assert capfd.readouterr().err == ""
