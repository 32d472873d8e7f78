"""Rows of weights that are read alone, and scales of nothing."""

import os
from pathlib import Path

import pytest
import torch

from tests.models import Good
from tests.mutations.edits import all_of, put, spoiled
from vexport.checkpoint.reader import DerivedReader, Reader
from vexport.checkpoint.smoothed import SmoothedReader
from vexport.checks import check_checkpoint
from vexport.errors import InputError
from vexport.records import TensorInfo


def stored(file: Path, data: bytes, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    file.write_bytes(data)
    return TensorInfo(name="one", dtype=dtype, shape=shape, file=file, start=0, end=len(data))


def test_some_rows_are_read_alone(tmp_path: Path) -> None:
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
        with pytest.raises(InputError, match="a file that stays the same"):
            reader.some_rows(tensor, 512)


def read_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_hole_in_a_file_is_known_without_reading(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as stream:
        stream.truncate(1 << 22)
        stream.seek(3 << 20)
        stream.write(b"data")
    with Reader() as reader:
        holes = [
            reader.is_hole(TensorInfo(name="one", dtype="U8", shape=(1,), file=file, start=start, end=end))
            for start, end in ((0, 1 << 20), (1 << 21, 1 << 22), (7 << 19, 1 << 22), (7 << 19, 1 << 23))
        ]
    assert holes == [True, False, True, False]


@pytest.mark.parametrize(("row", "broken"), [(slice(None), False), (slice(None), True), (slice(3, 4), True)])
def test_zero_scales_need_zero_weights(good: Good, tmp_path: Path, row: slice, broken: bool) -> None:
    """Of a whole scale and of one row; where the weight is no zero, that is an error."""
    layer = "model.layers.1.mlp.down_proj"

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(torch.uint8)[row] = 0
        return changed

    names = [f"{layer}.weight_scale", *([] if broken else [f"{layer}.weight_packed"])]
    folder = spoiled(good("NVFP4A16"), tmp_path / "spoiled", all_of(*(put(name, zeros) for name in names)))
    errors = [one for one in check_checkpoint(str(folder)).findings if one.severity == "error"]
    assert any(one.where == f"{layer}.weight_scale" and "zero" in one.got for one in errors) == broken, errors


@pytest.mark.parametrize("kind", [DerivedReader, SmoothedReader])
def test_readers_that_change_bytes_give_the_rows_of_these(kind: type[Reader]) -> None:
    """A reader's own rows come from the file."""
    assert {"raw", "is_in_place"} <= vars(kind).keys()
    assert set(Reader.__subclasses__()) == {DerivedReader, SmoothedReader}
