"""Reads the header of a safetensors file.

Format: 8 bytes little-endian length, a JSON header, the data (https://github.com/huggingface/safetensors).
"""

import json
import math
import struct
from pathlib import Path

from vexport.checkpoint.dtypes import BITS
from vexport.errors import InputError, require_working_disk
from vexport.records import Json, TensorInfo

# The longest header that safetensors itself accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their offsets.

    Raises InputError on a truncated or over-long file, a bad header, overlapping or ill-sized tensors.
    """
    if not file.is_file():
        raise _broken(file, "a folder" if file.is_dir() else "a link to nothing")
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size or length > MAX_HEADER_BYTES:
                raise _broken(file, f"{size} bytes with a header of {length}")
            data = stream.read(length)
    except OSError as error:
        require_working_disk(error, file)
        raise _broken(file, str(error)) from None
    try:
        header = json.loads(data.decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError("no JSON object")
        metadata = header.pop(METADATA, None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
            raise ValueError(f"{METADATA} that is no object of strings")
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in header.items()]
    except RecursionError:
        raise _broken(file, "the header error: values too deep in each other") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(file, f"the header error {error}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _require_contiguous(file, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: Path, name: str, entry: dict[str, Json], base: int) -> TensorInfo:
    """A tensor by its entry; ValueError, KeyError or TypeError for one that is none."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name}: unknown dtype {dtype}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{name}: shape or offsets are no lists")
    sides = tuple(side for side in shape if type(side) is int and side >= 0)
    start, end = offsets
    if len(sides) != len(shape) or type(start) is not int or type(end) is not int or min(start, end) < 0:
        raise ValueError(f"{name}: shape or offsets hold something else than sizes")
    if (end - start) * 8 != math.prod(sides) * BITS[dtype]:
        raise ValueError(f"{name}: {end - start} bytes for shape {shape} in {dtype}")
    return TensorInfo(name=name, dtype=dtype, shape=sides, file=file, start=base + start, end=base + end)


def _require_contiguous(file: Path, tensors: list[TensorInfo], base: int, size: int) -> None:
    position = base
    for tensor in tensors:
        if tensor.start != position:
            raise _broken(file, f"{tensor.name} at byte {tensor.start} instead of {position}")
        position = tensor.end
    if position != size:
        raise _broken(file, f"{size} bytes where the header describes {position}")


def _broken(file: Path, got: str) -> InputError:
    return InputError(str(file), got=got, need="a whole safetensors file", fix="download or export it again")
