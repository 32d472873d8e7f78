"""Reading of single rows, scales of zero weights, and exponents of a smoothing."""

import ctypes
import json
import mmap
import os
import time
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from tests.command import vexport
from tests.models import Good
from tests.mutations.edits import all_of, put, spoiled
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import encode, smoothing_of
from vexport.checks import check_checkpoint
from vexport.errors import InputError
from vexport.records import TensorInfo


def stored(file: Path, data: bytes, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    file.write_bytes(data)
    return TensorInfo(name="one", dtype=dtype, shape=shape, file=file, start=0, end=len(data))


def test_only_needed_rows_are_read(tmp_path: Path) -> None:
    rows, size = 1 << 13, 1 << 12
    data = torch.randint(0, 256, (rows, size), dtype=torch.uint8).numpy()
    tensor = stored(tmp_path / "file", data.tobytes(), "U8", (rows, size))
    with Reader() as reader:
        before = read_bytes()
        found = reader.some_rows(tensor, 512)
        assert read_bytes() - before < 20 * size
        assert (found == data[::512]).all()
        assert (reader.rows(tensor, [7, 3]) == data[[7, 3]]).all()
        os.truncate(tensor.file, rows * size // 2)
        with pytest.raises(InputError, match="a file that does not change"):
            reader.some_rows(tensor, 512)


def read_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize(
    ("row", "broken"), [(slice(None), False), (slice(None), True), (slice(3, 4), True)]
)
def test_zero_scales_need_zero_weights(
    good: Good, tmp_path: Path, row: slice, broken: bool
) -> None:
    """A whole scale is zero, or one row. A zero scale for other weights is an error."""
    layer = "model.layers.1.mlp.down_proj"

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(torch.uint8)[row] = 0
        return changed

    names = [f"{layer}.weight_scale", *([] if broken else [f"{layer}.weight_packed"])]
    folder = spoiled(
        good("NVFP4A16"), tmp_path / "spoiled", all_of(*(put(name, zeros) for name in names))
    )
    errors = [
        finding for finding in check_checkpoint(str(folder)).findings if finding.severity == "error"
    ]
    assert (
        any(error.where == f"{layer}.weight_scale" and "zero" in error.got for error in errors)
        == broken
    ), errors


LAYER = "model.layers.0."


def exponents(*values: int) -> str:
    return encode(np.array(values, np.int8))


def pair(rows: str, columns: str, reader: str = f"{LAYER}mlp.down_proj.weight") -> str:
    """Return the JSON text of exponents for two tensors."""
    maker = {"rows": rows, "columns": ""}
    tensors = {f"{LAYER}mlp.up_proj.weight": maker, reader: {"rows": "", "columns": columns}}
    return json.dumps({"tensors": tensors})


SOUND = pair(exponents(1, -2), exponents(-1, 2))
FORGED: dict[str, str | bytes] = {
    "one side": json.dumps(
        {"tensors": {f"{LAYER}mlp.up_proj.weight": {"rows": exponents(1), "columns": ""}}}
    ),
    "both sides alike": pair(exponents(1, -2), exponents(1, -2)),
    "another layer": pair(exponents(1), exponents(-1), "model.layers.1.mlp.down_proj.weight"),
    "to infinity": pair(exponents(127), exponents(-127)),
    "no base64": pair("!!!", ""),
    "no text": pair(exponents(1), "").replace('""', "5"),
    "cut": SOUND[:40],
    "not UTF-8": b"\xff\xfe\0",
}


def test_sound_exponents_are_read(tmp_path: Path) -> None:
    (tmp_path / "smoothing.json").write_text(SOUND)
    assert len(smoothing_of(tmp_path)) == 2


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED.keys())
def test_invalid_exponents_are_refused(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "smoothing.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match="smoothing.json"):
        smoothing_of(tmp_path)


def test_huge_exponents_are_refused(good: Good, llama: Path, tmp_path: Path) -> None:
    """With 2^127, all weights of the source would be infinite. No weight differs from them."""
    folder = copytree(good("W4A16"), tmp_path / "forged")
    (folder / "smoothing.json").write_text(pair(exponents(127), exponents(-127)))
    ran = vexport("check", folder, "--source", llama)
    assert ran.code == 1
    assert "the exponent 127" in ran.stdout


def resident_pages(file: Path) -> int:
    """Return the number of a file's pages in the page cache."""
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages)
    return sum(page & 1 for page in pages)


def test_prefetch_reads_whole_tensor_into_page_cache(tmp_path: Path) -> None:
    """A single call of madvise reads only the first megabytes of a long range."""
    file = tmp_path / "model.safetensors"
    pages = (32 << 20) // mmap.PAGESIZE
    tensor = stored(file, bytes(pages * mmap.PAGESIZE), "U8", (pages, mmap.PAGESIZE))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(file):
        pytest.skip("the file system keeps files in memory")
    with Reader() as reader:
        reader.prefetch([tensor])
        for _ in range(100):
            if resident_pages(file) >= pages:
                break
            time.sleep(0.1)
    assert resident_pages(file) >= pages
