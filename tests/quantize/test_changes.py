"""Files that change during a quantization.

Nothing wrong is published, and the change is an error.
"""

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
from vexport.names import Folder
from vexport.plan.source import scheme_rules
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.repair import repair_checkpoint
from vexport.scenario import Planning


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", hidden=256, layers=2)


def quantize(source: Path, out: Path, change: Callable[[Path], object] | None = None) -> None:
    """Write W8A8 in several shards. In the middle, `change` is called once with the source."""
    changes = [change] if change is not None else []

    def on_progress(stage: str, done: int, total: int) -> None:
        if changes and stage == "quantize (bytes)" and done >= total // 2:
            changes.pop()(source)

    rules = scheme_rules(Planning(scheme="W8A8", observer="memoryless_minmax"))
    job = QuantizeJob(source=Folder.at(source), out=out, rules=rules, on_progress=on_progress)
    quantize_source(replace(job, shard_bytes=1_000_000))


def interrupt_quantization(source: Path, out: Path) -> Path:
    """Interrupt a quantization in the middle, and return the folder with the files so far."""

    def interrupt(source: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, interrupt)
    return out.parent / f".{out.name}.partial" / "new"


def test_finished_shards_are_reused(source: Path, tmp_path: Path) -> None:
    (first,) = interrupt_quantization(source, tmp_path / "out").glob("model-00001-of-*.safetensors")
    before = first.stat().st_mtime_ns
    quantize(source, tmp_path / "out")
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == before


def rewrite(source: Path) -> None:
    """Rewrite a file as a repeated download does.

    Truncating it would end a process that maps the file.
    """
    file = next(source.glob("*.safetensors"))
    with file.open("r+b") as stream:
        stream.write(file.read_bytes())


def edit_config(source: Path) -> None:
    """Change the config, which is read at the beginning and copied at the end."""
    (source / "config.json").write_text((source / "config.json").read_text() + " ")


def redirect_link(source: Path) -> None:
    """Redirect the source's link, as the hub's cache does for a new revision."""
    other = copytree(source, source.parent / "other", copy_function=copyfile)
    new = source.parent / "new"
    new.symlink_to(other)
    new.replace(source)


def remove(source: Path) -> None:
    """Remove a file, as a clean-up job may do."""
    next(source.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("change", [rewrite, edit_config, redirect_link, remove])
def test_changed_source_publishes_nothing(
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


def test_changed_source_starts_again(source: Path, tmp_path: Path) -> None:
    interrupt_quantization(source, tmp_path / "out")
    file = min(source.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_changed_checkpoint_stops_repair(good: Good, tmp_path: Path) -> None:
    source = copytree(good("W4A16"), tmp_path / "source")

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == "write":
            rewrite(source)

    with pytest.raises(InputError, match="does not change"):
        repair_checkpoint(source, tmp_path / "out", None, overwrite=False, on_progress=on_progress)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden=64, layers=1)
    index = read_index(source)
    tensor = max(index.tensors.values(), key=lambda tensor: tensor.end)
    os.truncate(tensor.file, tensor.end - 1)
    with Reader() as reader, pytest.raises(InputError, match="does not change") as caught:
        reader.raw(tensor)
    assert str(tensor.file) in str(caught.value)


@pytest.mark.parametrize("place", ["the last unit", "the record"])
def test_damaged_shard_is_written_again(source: Path, tmp_path: Path, place: str) -> None:
    quantize(source, tmp_path / "whole")
    shard = min(interrupt_quantization(source, tmp_path / "out").glob("model-*.safetensors"))
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
def test_damaged_kernel_cache_is_rebuilt(tmp_path: Path) -> None:
    """Files are empty or contain garbage. Without vexport's wrapper, numba raises errors."""
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


def test_folder_of_other_call_is_unchanged(source: Path, tmp_path: Path) -> None:
    work, begun = tmp_path / ".out.partial", list[object]()

    def begin_again(source: Path) -> None:
        rmtree(work)
        begun.append(digests(interrupt_quantization(source, tmp_path / "out")))

    with pytest.raises(InputError, match="the folder was replaced"):
        quantize(source, tmp_path / "out", begin_again)
    assert begun == [digests(work / "new")]
