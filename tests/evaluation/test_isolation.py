"""One broken file among several: named, and the others answered or nothing done; what is printed is whole."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import write_calibration


def replaced(replace: Callable[[Path], None]) -> Callable[[Path], None]:
    """What takes the place of a file."""

    def apply(file: Path) -> None:
        file.unlink()
        replace(file)

    return apply


def wrote(data: bytes) -> Callable[[Path], None]:
    return lambda file: None if file.write_bytes(data) else None


BROKEN: dict[str, Callable[[Path], None]] = {
    "empty": wrote(b""),
    "garbage": wrote(bytes(range(256)) * 9),
    "latin-1": wrote('{"text": "déjà"}\n'.encode("latin-1")),
    "a folder": replaced(Path.mkdir),
    "a loop of links": replaced(lambda file: file.symlink_to(file.name)),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("side", ["baseline", "twin"])
def test_a_broken_file_of_results_is_named(how: str, side: str, lm_eval_runs: Path, tmp_path: Path) -> None:
    """A file of samples of one task among three: no verdict is given on what is left."""
    for name in ("baseline", "twin"):
        shutil.copytree(lm_eval_runs / name, tmp_path / name)
    file = sorted((tmp_path / side).rglob("samples_*.jsonl"))[1]
    BROKEN[how](file)
    for format_ in ("json", "junit"):
        answer = tmp_path / f"answer.{format_}"
        ran = vexport("verdict", tmp_path / "baseline", tmp_path / "twin", "--format", format_, "-o", answer)
        assert (ran.code, ran.stdout, len(ran.errors)) == (2, "", 1), ran
        assert str(file) in ran.errors[0]
        assert not answer.exists()


@pytest.mark.parametrize("how", ["garbage", "latin-1", "a loop of links"])
def test_a_broken_file_of_calibration_is_named(how: str, llama: Path, tmp_path: Path) -> None:
    """The last of three in a folder, so that the first ones are read before it is met."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b", "c"):
        write_calibration(data / f"{name}.jsonl", rows=2)
    BROKEN[how](data / "c.jsonl")
    words = ("quantize", llama, tmp_path / "out", "--scheme", "FP8", "--calibration", data, "--seq-len", "8")
    ran = vexport(*words, "--samples", "6", "--quiet")
    named = [line for line in ran.errors if str(data / "c.jsonl") in line]
    assert (ran.code, ran.stdout) == (2, ""), ran
    assert named == ran.errors
    assert named
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
