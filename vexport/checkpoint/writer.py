"""Writes safetensors shards whose tensors are known beforehand and arrive one by one."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import INDEX_NAME, SINGLE_NAME
from vexport.files import write_text
from vexport.types import Json, TensorSpec

# transformers' own default for the size of a shard (modeling_utils.save_pretrained).
DEFAULT_SHARD_BYTES = 5_000_000_000
METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file to be written: its name and its tensors in order."""

    name: str
    tensors: tuple[TensorSpec, ...]


def split_shards(
    blocks: Iterable[Sequence[TensorSpec]], *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[Shard, ...]:
    """Distribute blocks of tensors over shards in order; a block is never split, a shard never empty."""
    contents: list[list[TensorSpec]] = [[]]
    filled = 0
    for block in blocks:
        size = sum(num_bytes(spec.dtype, spec.shape) for spec in block)
        if contents[-1] and filled + size > shard_bytes:
            contents.append([])
            filled = 0
        contents[-1].extend(block)
        filled += size
    count = len(contents)
    names = (
        [SINGLE_NAME]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    return tuple(Shard(name=name, tensors=tuple(specs)) for name, specs in zip(names, contents, strict=True))


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index that a checkpoint of several shards needs; nothing for a single one."""
    if len(shards) == 1:
        return
    weight_map: dict[str, Json] = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    total = sum(num_bytes(spec.dtype, spec.shape) for shard in shards for spec in shard.tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")


class ShardWriter:
    """Writes the tensors of one shard in the order of its header; memory holds one tensor at a time."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._pending = list(reversed(shard.tensors))
        self._file: BinaryIO = (folder / shard.name).open("wb")
        self._file.write(header_bytes(shard.tensors))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._pending, f"tensors not written: {self._pending}"

    def write(self, name: str, data: memoryview | bytes) -> None:
        """Append the next tensor; its name and size must be those that the header announces."""
        spec = self._pending.pop()
        expected = num_bytes(spec.dtype, spec.shape)
        assert name == spec.name, f"got tensor {name}, the header has {spec.name} next"
        assert len(data) == expected, f"{name}: got {len(data)} bytes, the header says {expected}"
        self._file.write(data)


def header_bytes(tensors: Sequence[TensorSpec]) -> bytes:
    """Length prefix and JSON header of a safetensors file, padded to 8 bytes as safetensors writes it."""
    header: dict[str, object] = {"__metadata__": METADATA}
    position = 0
    for spec in tensors:
        end = position + num_bytes(spec.dtype, spec.shape)
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shards(folder: Path, shards: Sequence[Shard], tensors: Iterator[tuple[str, memoryview]]) -> None:
    """Write the (name, bytes) pairs, which come in the shards' order, into shards, then the index."""
    for shard in shards:
        with ShardWriter(folder, shard) as writer:
            for name, data in itertools.islice(tensors, len(shard.tensors)):
                writer.write(name, data)
    write_index(folder, shards)
