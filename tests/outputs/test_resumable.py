"""The hidden folder next to OUT is refused unless vexport made it.

OUT is the old or the new folder.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import ROOT, vexport
from tests.models import Good
from tests.outputs.test_separate import tree
from tests.quantize.test_streaming import digests, write_model
from vexport.errors import EnvironmentFault, InputError
from vexport.files import atomic_path
from vexport.outputs.manifest import begin_manifest, record
from vexport.outputs.resumable import resumable_directory


def link_as_record(work: Path, mine: Path) -> None:
    work.mkdir()
    (work / ".made-from").symlink_to(mine / "precious")


def link_as_folder(work: Path, mine: Path) -> None:
    work.symlink_to(mine)


def shard_as_link(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "new" / "model.safetensors").unlink()
    (work / "new" / "model.safetensors").symlink_to(mine / "precious")


def file_next_to_shards(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "new" / "letter.txt").write_text("mine")


def foreign_shard(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "new" / "mine.safetensors").write_text("mine")


def file_aside(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "aside" / "deep").mkdir(parents=True)
    (work / "aside" / "deep" / "letter.txt").write_text("mine")


def file_next_to_old(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "old").mkdir()
    (work / "old" / "vexport.json").write_text('{"files": ["config.json"]}')
    (work / "old" / "letter.txt").write_text("mine")


def new_as_link(work: Path, mine: Path) -> None:
    begin_work(work)
    (work / "new" / "model.safetensors").unlink()
    (work / "new").rmdir()
    (work / "new").symlink_to(mine)


def foreign_folder(work: Path, mine: Path) -> None:
    work.mkdir()
    (work / "letter.txt").write_text("mine")


def foreign_old_folder(work: Path, mine: Path) -> None:
    (work / "old").mkdir(parents=True)
    (work / "old" / "letter.txt").write_text("mine")


def file_as_folder(work: Path, mine: Path) -> None:
    work.write_text("mine")


def folder_of_other_user(work: Path, mine: Path) -> None:
    begin_work(work)
    os.chown(work, 12345, 12345)


def begin_work(work: Path) -> None:
    (work / "new").mkdir(parents=True)
    (work / ".made-from").write_text("a digest")
    begin_manifest(work)
    record(work / "new" / "model.safetensors")
    (work / "new" / "model.safetensors").write_text("half")


PLANTED = [
    *(link_as_record, link_as_folder, shard_as_link, new_as_link),
    *(file_next_to_shards, foreign_shard, file_aside, file_next_to_old),
    *(foreign_folder, foreign_old_folder, file_as_folder, folder_of_other_user),
]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("command", ["quantize", "repair"])
def test_foreign_hidden_folder_is_refused(
    command: str, plant: Callable[[Path, Path], None], tmp_path: Path, llama: Path, good: Good
) -> None:
    if plant is folder_of_other_user and os.geteuid() != 0:
        pytest.skip("only root can change the owner of a file")
    mine, work = tmp_path / "mine", tmp_path / ".out.partial"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    plant(work, mine)
    before = tree(tmp_path)
    words = {
        "quantize": ("quantize", llama, tmp_path / "out", "--scheme", "FP8_DYNAMIC"),
        "repair": ("repair", good("FP8_DYNAMIC"), tmp_path / "out"),
    }
    ran = vexport(*words[command], "--overwrite", "--quiet")
    assert ran.code == 2, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert f"check and remove {work}" in line
    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()


def write(out: Path, text: str, *, input_digest: str = "x", stop: bool = False) -> None:
    with resumable_directory(out, input_digest=input_digest, overwrite=True) as folder:
        record(folder / "config.json")
        (folder / "config.json").write_text(text)
        if stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, OSError])
def test_interrupted_publish_keeps_old_or_new(
    step: int,
    moment: str,
    fault: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, rename, steps = tmp_path / "out", Path.rename, []
    write(out, "old")

    def interrupted(self: Path, target: Path) -> Path:
        steps.append(self)
        stops = len(steps) == step + 1
        if stops and moment == "before":
            raise fault
        renamed = rename(self, target)
        if stops:
            raise fault
        return renamed

    with monkeypatch.context() as patches:
        patches.setattr(Path, "rename", interrupted)
        with pytest.raises(fault):
            write(out, "new")
    assert (out / "config.json").read_text() == ("new" if (step, moment) == (1, "after") else "old")
    write(out, "newer")
    assert (out / "config.json").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_next_call_restores_old_folder(tmp_path: Path) -> None:
    """The first call was killed between the two renames that publish the output."""
    out, work = tmp_path / "out", tmp_path / ".out.partial"
    write(out, "old")
    with pytest.raises(KeyboardInterrupt):
        write(out, "new", stop=True)
    out.rename(work / "old")  # as if SIGKILL came after the first of two renames
    with pytest.raises(KeyboardInterrupt):
        write(out, "other", input_digest="y", stop=True)
    assert (out / "config.json").read_text() == "old"


def test_new_foreign_output_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write_while_someone_else_does() -> None:
        with resumable_directory(out, input_digest="x", overwrite=True) as folder:
            record(folder / "model.safetensors")
            (folder / "model.safetensors").write_text("hours of work")
            out.mkdir()
            (out / "letter.txt").write_text("mine")

    with pytest.raises(InputError, match="did not make"):
        write_while_someone_else_does()
    assert tree(out) == {"letter.txt": b"mine"}
    assert (tmp_path / ".out.partial" / "new" / "model.safetensors").read_text() == "hours of work"


@pytest.mark.slow
@pytest.mark.parametrize("largest", [0, 300_000])
def test_quota_error_and_next_call(largest: int, tmp_path: Path) -> None:
    """The system refuses bytes after `largest` (EFBIG).

    The limit is the first byte of a shard, or a byte in its middle.
    """
    source = write_model(tmp_path / "source", hidden=512, layers=2)
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ("--scheme", "W8A8", "--quiet", "--max-shard-size", "1MB")
    limited = subprocess.run(
        [sys.executable, "-B", "-m", "vexport", "quantize", source, out, *options],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = limited.stderr.splitlines()
    assert limited.returncode == 4, line
    assert str(tmp_path) in line
    assert not out.exists()
    for folder in (out, whole):
        ran = vexport("quantize", source, folder, *options)
        assert (ran.code, ran.stderr) == (0, "")
    assert digests(out) == digests(whole)


def test_full_disk_in_library_names_file(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        with atomic_path(path):
            raise RuntimeError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )

    with pytest.raises(EnvironmentFault, match=r"layer\.safetensors: the disk is full"):
        write(tmp_path / "layer.safetensors")
    assert list(tmp_path.iterdir()) == []
