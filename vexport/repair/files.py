"""The index of a checkpoint and its metadata, made again from the headers of the files that are there."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.checkpoint.header import read_header
from vexport.checkpoint.index import (
    INDEX_NAME,
    SINGLE_NAME,
    SourceIndex,
    content_files,
    file_inside,
    require_checkpoint,
    side_files_of,
    statuses_of,
)
from vexport.errors import InputError, raise_all
from vexport.files import read_json_object
from vexport.repair.changes import LOSSLESS, Repair
from vexport.types import Json, TensorInfo

NAME = "index"
SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldIndex:
    """The index as it was found: an unreadable one is empty."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Json]


def open_checkpoint(root: Path) -> tuple[SourceIndex, tuple[Repair, ...]]:
    """The checkpoint by its headers, and what its index says otherwise.

    Raises InputError, or InputErrors, for files that are missing or broken: nothing can replace them.
    """
    require_checkpoint(root)
    statuses = statuses_of(content_files(root))
    config = read_json_object(root / "config.json")
    old = _old_index(root)
    files = _files(root, old)
    statuses |= statuses_of(files)
    headers = {file: read_header(file) for file in files}
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    raise_all(list(_lost(root, old, tensors)))
    side_files = side_files_of(root)
    index = SourceIndex(root=root, config=config, tensors=tensors, side_files=side_files, statuses=statuses)
    return index, tuple(_repairs(root, old, index, len(headers)))


def index_text(index: SourceIndex) -> str:
    """The index of a checkpoint's tensors; other metadata of the old one stays."""
    metadata = {**_old_index(index.root).metadata, "total_size": index.num_bytes}
    return json.dumps({"metadata": metadata, "weight_map": _weight_map(index)}, indent=2) + "\n"


def has_index(index: SourceIndex) -> bool:
    """Whether the checkpoint has or needs an index."""
    files = {tensor.file for tensor in index.tensors.values()}
    return len(files) > 1 or (index.root / INDEX_NAME).is_file()


def _old_index(root: Path) -> OldIndex:
    try:
        raw = read_json_object(root / INDEX_NAME)
    except InputError:
        return OldIndex(weight_map={}, metadata={})
    names, metadata = raw.get("weight_map"), raw.get("metadata")
    return OldIndex(
        weight_map={name: str(file) for name, file in names.items()} if isinstance(names, dict) else {},
        metadata=metadata if isinstance(metadata, dict) else {},
    )


def _files(root: Path, old: OldIndex) -> list[Path]:
    """The weight files: those that the index names and that are there, and shards that it forgot."""
    written = (file_inside(root, name) for name in {*old.weight_map.values()})
    named = {file for file in written if file is not None and file.is_file()}
    shards = {path for path in root.glob("*.safetensors") if SHARD.match(path.name)}
    single = root / SINGLE_NAME
    if len(named | shards) > 1 and single not in named:
        shards.discard(single)
    files = named | shards or {*root.glob("*.safetensors")}
    if not files:
        raise InputError(
            str(root), got="no safetensors file", need=SINGLE_NAME, fix="restore the files of the weights"
        )
    return sorted(files)


def _lost(root: Path, old: OldIndex, tensors: Mapping[str, TensorInfo]) -> Iterator[InputError]:
    """One problem for each file that is missing and held tensors that no other file has."""
    absent: dict[str, str] = {}
    for name, file in old.weight_map.items():
        if name not in tensors and not (root / file).is_file():
            absent.setdefault(file, name)
    for file, name in absent.items():
        yield InputError(
            str(root / file),
            got="no such file",
            need=f"the shard that holds {name}",
            fix="download or export it again",
        )


def _weight_map(index: SourceIndex) -> dict[str, str]:
    return {name: tensor.file.name for name, tensor in sorted(index.tensors.items())}


def _repairs(root: Path, old: OldIndex, index: SourceIndex, files: int) -> Iterator[Repair]:
    place = str(root / INDEX_NAME)
    if not (root / INDEX_NAME).is_file():
        if files > 1:
            yield _repair(place, f"no index of {files} files", "an index")
        return
    right = _weight_map(index)
    wrong = sum(old.weight_map.get(name) != file for name, file in right.items())
    gone = len(old.weight_map.keys() - right.keys())
    if wrong or gone:
        yield _repair(
            f"{place}: weight_map",
            f"{wrong} tensors missing or in another file, {gone} that are nowhere",
            "from the headers",
        )
    if old.metadata.get("total_size") not in (None, index.num_bytes):
        got = str(old.metadata.get("total_size"))
        yield _repair(f"{place}: metadata.total_size", got, str(index.num_bytes))


def _repair(where: str, got: str, now: str) -> Repair:
    return Repair(family=NAME, where=where, got=got, now=now, cost=LOSSLESS)
