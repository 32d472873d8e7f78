"""Reads the header of a safetensors file: what safetensors, so vLLM, refuses is refused here.

Format: 8 bytes little-endian length, a JSON header, the data (https://github.com/huggingface/safetensors).
Python's `json` takes more than serde_json does: other encodings, NaN, lone surrogates, booleans as numbers,
a key twice.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from vexport.checkpoint.dtypes import BITS
from vexport.errors import InputError, require_working_disk
from vexport.types import Json, TensorInfo

# The longest header that safetensors itself accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
FIELDS = ("dtype", "shape", "data_offsets")
# serde_json stops at 128 levels, of which the header and a tensor's entry are two.
_MAX_DEPTH = 125
_MAX_SIZE = 2**64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MINUS_ZERO = b"-0"


class _Repeated(dict[str, Json]):
    """An object with a key twice; `pairs` has them all."""

    def __init__(self, pairs: list[tuple[str, Json]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


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
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in _entries(data)]
        by_name = {tensor.name: tensor for tensor in tensors}  # of a name twice the last one counts
        for tensor in by_name.values():
            _require_size(tensor)
    except RecursionError:
        raise _broken(file, "the header error: values too deep in each other") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(file, f"the header error {error}") from None
    tensors = sorted(by_name.values(), key=lambda tensor: (tensor.start, tensor.end))
    _require_contiguous(file, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _entries(data: bytes) -> Iterator[tuple[str, dict[str, Json]]]:
    """Each tensor's entry by its name; ValueError for what serde_json refuses."""
    header = _parsed(data)
    for name, entry in _pairs(header):
        if name == METADATA:
            _require_texts(entry)
        elif not isinstance(entry, dict):
            raise ValueError(f"{name}: no JSON object")
        else:
            yield name, entry
    _require_once(header, (METADATA,), "the header")


def _parsed(data: bytes) -> dict[str, Json]:
    text = data.decode("utf-8")
    if _SURROGATE.search(data):
        for literal in _STRING.findall(text):
            json.loads(literal).encode()
    # Hooks cost time, and few headers need the one for integers.
    parse_int = _whole_number if _MINUS_ZERO in data else None
    header = json.loads(
        text,
        object_pairs_hook=_object,
        parse_constant=_refuse_number,
        parse_float=_finite,
        parse_int=parse_int,
    )
    if not isinstance(header, dict):
        raise ValueError("no JSON object")
    return header


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else _Repeated(pairs)


def _pairs(value: dict[str, Json]) -> Iterable[tuple[str, Json]]:
    return value.pairs if isinstance(value, _Repeated) else value.items()


def _require_once(value: dict[str, Json], keys: tuple[str, ...], where: str) -> None:
    if isinstance(value, _Repeated):
        names = [name for name, _ in value.pairs if name in keys]
        if len(names) != len({*names}):
            raise ValueError(f"{where}: the key {max(names, key=names.count)} twice")


def _whole_number(digits: str) -> int | float:
    """serde_json reads -0 as a float."""
    return -0.0 if digits == "-0" else int(digits)


def _refuse_number(name: str) -> float:
    raise ValueError(f"{name}, which is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]}, which is out of range")
    return value


def _require_texts(metadata: Json) -> None:
    """The metadata are an object of strings; safetensors refuses all else, null excepted."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for _, value in _pairs(metadata)):
        raise ValueError(f"{METADATA} that is no object of strings")


def _require_plain(where: str, value: Json) -> None:
    """What stands in further keys is dropped, but it is parsed: not too deep, numbers in the range."""
    level, depth = [value], 0
    while level:
        containers = [item for item in level if isinstance(item, (dict, list))]
        depth += bool(containers)
        if depth > _MAX_DEPTH:
            raise ValueError(f"{where}: values more than {_MAX_DEPTH} deep in each other")
        for item in level:
            if type(item) is int:
                _finite(str(item))
        level = [
            inner
            for item in containers
            for inner in ((pair[1] for pair in _pairs(item)) if isinstance(item, dict) else item)
        ]


def _tensor(file: Path, name: str, entry: dict[str, Json], base: int) -> TensorInfo:
    _require_once(entry, FIELDS, name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if len(entry) > len(FIELDS):
        for key, value in _pairs(entry):
            if key not in FIELDS:
                _require_plain(name, value)
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name}: unknown dtype {dtype}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{name}: shape or offsets are no lists")
    sides = tuple(side for side in shape if type(side) is int and 0 <= side < _MAX_SIZE)
    start, end = offsets
    if len(sides) != len(shape) or type(start) is not int or type(end) is not int or min(start, end) < 0:
        raise ValueError(f"{name}: shape or offsets hold something else than sizes")
    return TensorInfo(name=name, dtype=dtype, shape=sides, file=file, start=base + start, end=base + end)


def _require_size(tensor: TensorInfo) -> None:
    size = tensor.end - tensor.start
    if size < 0 or size * 8 != _elements(tensor.name, tensor.shape) * BITS[tensor.dtype]:
        raise ValueError(f"{tensor.name}: {size} bytes for shape {list(tensor.shape)} in {tensor.dtype}")


def _elements(name: str, shape: tuple[int, ...]) -> int:
    """The product of the sides from the first on, which safetensors computes in 64 bits."""
    elements = 1
    for side in shape:
        elements *= side
        if elements >= _MAX_SIZE:
            raise ValueError(f"{name}: more elements than 64 bits count")
    return elements


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
