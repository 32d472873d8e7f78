"""Files change during a quantization: nothing wrong is published, and the change is reported."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, copytree, rmtree

import pytest

from tests.models import Good
from tests.quantize.test_streaming import digests, write_model
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.errors import InputError
from vexport.plan.source import rules_for
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.repair import repair_checkpoint
from vexport.scenario import Planning


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", hidden=256, layers=2)


def quantize(source: Path, out: Path, change: Callable[[Path], object] | None = None) -> None:
    """Write W8A8 in several shards; in the middle `change` is called once with the source."""
    changes = [change] if change is not None else []

    def on_progress(stage: str, done: int, total: int) -> None:
        if changes and stage == "quantize (bytes)" and done >= total // 2:
            changes.pop()(source)

    rules = rules_for(Planning(scheme="W8A8", observer="memoryless_minmax"))
    job = QuantizeJob(source=str(source), out=out, rules=rules, on_progress=on_progress)
    quantize_source(replace(job, shard_bytes=1_000_000))


def break_off(source: Path, out: Path) -> Path:
    """Interrupt a quantization in the middle, and return the folder with the files so far."""

    def interrupt(source: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, interrupt)
    return out.parent / f".{out.name}.partial" / "new"


def test_what_is_written_is_not_written_again(source: Path, tmp_path: Path) -> None:
    (first,) = break_off(source, tmp_path / "out").glob("model-00001-of-*.safetensors")
    before = first.stat().st_mtime_ns
    quantize(source, tmp_path / "out")
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == before


def rewrite(source: Path) -> None:
    """As a download that is repeated; not cut on the way, which ends a process that has the file
    mapped.
    """
    file = next(source.glob("*.safetensors"))
    with file.open("r+b") as stream:
        stream.write(file.read_bytes())


def edit_config(source: Path) -> None:
    """The config is read at the beginning; files next to it are copied at the end."""
    (source / "config.json").write_text((source / "config.json").read_text() + " ")


def turn_link(source: Path) -> None:
    """As the hub's folder of a revision, when the next one comes."""
    other = copytree(source, source.parent / "other", copy_function=copyfile)
    new = source.parent / "new"
    new.symlink_to(other)
    new.replace(source)


def remove(source: Path) -> None:
    """As a clean-up that does not know of us."""
    next(source.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("change", [rewrite, edit_config, turn_link, remove])
def test_sources_replaced_meanwhile_are_unpublished(
    change: Callable[[Path], object], source: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises((InputError, FileNotFoundError)) as caught:
        quantize(link, tmp_path / "out", change)
    assert str(link) in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} - {"other", ".out.partial"} == {
        "link",
        "source",
    }


def test_what_was_written_of_another_source_is_not_continued(source: Path, tmp_path: Path) -> None:
    break_off(source, tmp_path / "out")
    file = min(source.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_checkpoint_that_is_replaced_while_it_is_repaired(good: Good, tmp_path: Path) -> None:
    source = copytree(good("W4A16"), tmp_path / "source")

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == "write":
            rewrite(source)

    with pytest.raises(InputError, match="stays the same"):
        repair_checkpoint(source, tmp_path / "out", None, overwrite=False, on_progress=on_progress)


def test_a_file_cut_before_it_is_mapped_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=64, layers=1)
    index = read_index(source)
    tensor = max(index.tensors.values(), key=lambda tensor: tensor.end)
    os.truncate(tensor.file, tensor.end - 1)
    with Reader() as reader, pytest.raises(InputError, match="stays the same") as caught:
        reader.raw(tensor)
    assert str(tensor.file) in str(caught.value)


@pytest.mark.parametrize("place", ["the last unit", "the record"])
def test_a_shard_of_wrong_bytes_is_written_again(source: Path, tmp_path: Path, place: str) -> None:
    quantize(source, tmp_path / "whole")
    shard = min(break_off(source, tmp_path / "out").glob("model-*.safetensors"))
    if place == "the record":
        shard.with_name(f"{shard.name}.progress").write_bytes(b"00000000\n" * 3)
    else:
        data = bytearray(shard.read_bytes())
        data[-9] ^= 0x55
        shard.write_bytes(data)
    quantize(source, tmp_path / "out")
    assert digests(tmp_path / "whole") == digests(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.progress"))


@pytest.mark.slow
def test_a_damaged_kernel_cache_is_made_again(tmp_path: Path) -> None:
    """Empty, garbage, cut: numba's own errors, or none, in the place of an answer."""
    code = (
        "import sys, numpy as np\n"
        "from vexport.numerics.jit import compiled\n"
        "from vexport.numerics.arithmetic import largest_magnitude\n"
        "print(largest_magnitude(np.arange(4, dtype=np.float32), 0))\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run() -> tuple[str, str]:
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return ran.stdout, ran.stderr

    first = run()
    for ending, damage in (("nbi", b""), ("nbc", b"\0" * 300)):
        files = list((tmp_path / "cache").rglob(f"*.{ending}"))
        assert files
        for file in files:
            file.write_bytes(damage)
        assert run() == first


def test_folder_of_another_call_stays_unchanged(source: Path, tmp_path: Path) -> None:
    work, begun = tmp_path / ".out.partial", list[object]()

    def begin_again(source: Path) -> None:
        rmtree(work)
        begun.append(digests(break_off(source, tmp_path / "out")))

    with pytest.raises(InputError, match="another folder than the one that was begun"):
        quantize(source, tmp_path / "out", begin_again)
    assert begun == [digests(work / "new")]
