"""Mutations of files and headers."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.mutations.edits import INDEX, WEIGHTS, Change, Tensors, file_bytes, header, index
from tests.mutations.good import Sound
from vexport.records import Json

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
NORM = "model.norm.weight"


def kinds(sound: Sound) -> Iterator[tuple[str, Change]]:
    """Yield all mutations, which do not depend on the scheme."""
    yield from _bytes(sound)
    yield from _headers(sound)
    yield from _indices(sound)


def _bytes(sound: Sound) -> Iterator[tuple[str, Change]]:
    yield "file truncated", file_bytes(WEIGHTS, lambda data: data[:-10])
    yield "file cut to half", file_bytes(WEIGHTS, lambda data: data[: len(data) // 2])
    yield "file cut in the header", file_bytes(WEIGHTS, lambda data: data[:100])
    yield "file too long", file_bytes(WEIGHTS, lambda data: data + bytes(8))
    yield "file empty", file_bytes(WEIGHTS, lambda data: b"")
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    yield "file a pointer of git-lfs", file_bytes(WEIGHTS, lambda data: pointer)
    yield "header spoiled", file_bytes(WEIGHTS, lambda data: data[:8] + b"x" + data[9:])
    yield (
        "header length huge",
        file_bytes(WEIGHTS, lambda data: (2**62).to_bytes(8, "little") + data[8:]),
    )
    yield "header length zero", file_bytes(WEIGHTS, lambda data: bytes(8) + data[8:])
    yield "header length big-endian", file_bytes(WEIGHTS, lambda data: data[7::-1] + data[8:])
    yield "weights missing", lambda folder: (folder / WEIGHTS).unlink()
    yield "weights under another name", lambda folder: _move(folder, "weights.safetensors")
    yield "config no JSON", file_bytes("config.json", lambda data: data[:-5])
    yield "config empty", file_bytes("config.json", lambda data: b"")
    yield "config missing", lambda folder: (folder / "config.json").unlink()
    yield "a stray pickle beside", lambda folder: _write(folder / "notes.bin", b"no pickle")


def _headers(sound: Sound) -> Iterator[tuple[str, Change]]:
    yield "header padded", header(lambda entries: None, padding=64)
    yield "header without metadata", header(lambda entries: entries.pop("__metadata__", None))
    yield (
        "metadata of tensorflow",
        header(lambda entries: entries.update({"__metadata__": {"format": "tf"}})),
    )
    yield "unknown dtype in the header", header(_set(NORM, "dtype", "F8_E3M4"))
    yield "norm declared F16", header(_set(NORM, "dtype", "F16"))
    yield "norm declared I16", header(_set(NORM, "dtype", "I16"))
    yield "norm of a negative side", header(_set(NORM, "shape", [-1]))
    yield "norm of a side too many", header(_set(NORM, "shape", [1, 128]))
    yield "norm of another size", header(_set(NORM, "shape", [64]))
    yield "offsets overlap", header(_same_offsets)
    yield (
        "offsets reversed",
        header(lambda entries: _entry(entries, NORM)["data_offsets"].reverse()),
    )
    yield "offsets beyond the file", header(lambda entries: _shift(entries, 1 << 20))
    yield "offsets shifted", header(lambda entries: _shift(entries, 2))


def _indices(sound: Sound) -> Iterator[tuple[str, Change]]:
    yield "index right", index(lambda values: dict.fromkeys(values, WEIGHTS))
    yield "index names a missing file", index(lambda values: dict.fromkeys(values, FIRST))
    bias = "model.layers.0.self_attn.q_proj.bias"
    yield (
        "index names a second, missing file",
        index(lambda values: {**dict.fromkeys(values, WEIGHTS), bias: SECOND}),
    )
    yield "index no JSON", lambda folder: _write(folder / INDEX, b"{")
    yield "index without a map", lambda folder: _write(folder / INDEX, b"{}")
    yield "index with an empty map", index(lambda values: {})
    yield "index lacks a tensor", index(lambda values: dict.fromkeys(sorted(values)[1:], WEIGHTS))
    more = "model.no_such"
    yield (
        "index names a tensor too many",
        index(lambda values: dict.fromkeys([*values, more], WEIGHTS)),
    )
    yield "two shards", _split
    yield "two shards, the second unnamed", partial(_split, named=False)
    yield "two shards without an index", partial(_split, indexed=False)
    yield "two shards, a tensor in both", partial(_split, twice=NORM)
    yield "two shards, another value in the second", partial(_split, twice=NORM, factor=2)
    yield "two shards, named crosswise", partial(_split, crosswise=True)
    yield "a shard left over", _leftover


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _move(folder: Path, name: str) -> None:
    (folder / INDEX).unlink(missing_ok=True)
    (folder / WEIGHTS).rename(folder / name)


def _entry(entries: dict[str, Json], name: str) -> dict[str, list[int]]:
    entry = entries[name]
    assert isinstance(entry, dict)
    return entry  # type: ignore[return-value]


def _set(name: str, key: str, value: Json) -> Callable[[dict[str, Json]], None]:
    return lambda entries: _entry(entries, name).update({key: value})  # type: ignore[dict-item]


def _same_offsets(entries: dict[str, Json]) -> None:
    other = "model.layers.0.input_layernorm.weight"
    _entry(entries, NORM)["data_offsets"] = list(_entry(entries, other)["data_offsets"])


def _shift(entries: dict[str, Json], by: int) -> None:
    offsets = _entry(entries, NORM)["data_offsets"]
    offsets[:] = [offset + by for offset in offsets]


def _split(
    folder: Path,
    *,
    named: bool = True,
    indexed: bool = True,
    crosswise: bool = False,
    twice: str = "",
    factor: int = 1,
) -> None:
    """Split the weights into two files, with an index or a part of an index."""
    values: Tensors = load_file(folder / WEIGHTS)
    first = {name: values[name] for name in sorted(values)[::2]}
    second = {name: value for name, value in values.items() if name not in first}
    files = {FIRST: first, SECOND: second}
    if twice:
        first[twice], second[twice] = values[twice].clone(), values[twice] * factor
    (folder / WEIGHTS).unlink()
    (folder / INDEX).unlink(missing_ok=True)
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    places = {
        name: file for file, part in files.items() for name in part if named or file != SECOND
    }
    if crosswise:
        places = {
            name: next(other for other in files if other != file) for name, file in places.items()
        }
    if indexed:
        content = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(content))


def _leftover(folder: Path) -> None:
    """Write an older export's shard next to the weights, which no index names."""
    values = load_file(folder / WEIGHTS)
    save_file({NORM: values[NORM] * 2}, folder / SECOND, metadata={"format": "pt"})
