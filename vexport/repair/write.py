"""Writes a repaired checkpoint: untouched files as they are, the others tensor by tensor."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from vexport.checkpoint.chat_template import copy_named_templates
from vexport.checkpoint.header import read_header
from vexport.checkpoint.index import INDEX_NAME, SourceIndex, unchanged
from vexport.checkpoint.writer import header_bytes
from vexport.checks.vllm.view import CheckpointView
from vexport.files import read_json_object, write_text
from vexport.outputs.digests import digest_of, record_digests, recorded_digests
from vexport.repair.overlay import Overlay
from vexport.types import OnProgress, TensorInfo, TensorSpec

COPY_BYTES = 1 << 24


def write_repaired(view: CheckpointView, folder: Path, *, on_progress: OnProgress) -> None:
    """Write weights, index and side files into the empty `folder`, config.json last.

    `on_progress` counts the bytes of the weights. Memory holds one edit or one part of a file.
    """
    with unchanged(view.index):
        _write_files(view, folder, on_progress)


def _write_files(view: CheckpointView, folder: Path, on_progress: OnProgress) -> None:
    index = view.index
    files: dict[Path, list[TensorInfo]] = {}
    for tensor in index.tensors.values():
        files.setdefault(tensor.file, []).append(tensor)
    recorded, digests, done = recorded_digests(index.root), dict[str, str](), 0
    for file, tensors in files.items():
        untouched = _is_untouched(view, file, tensors)
        if untouched:
            _copy(file, folder / file.name)
        else:
            _write(view, tensors, folder / file.name)
        known = recorded.get(file.name) if untouched else None
        digests[file.name] = known or digest_of(folder / file.name)
        done += sum(tensor.num_bytes for tensor in tensors)
        on_progress("write", done, index.num_bytes)
    if (index.root / INDEX_NAME).is_file():
        write_text(folder / INDEX_NAME, _index_text(index))
    for path in index.side_files:
        shutil.copyfile(path, folder / path.name)
    record_digests(folder, digests)
    copy_named_templates(index.root, folder)
    _write_config(index, folder)


def _index_text(index: SourceIndex) -> str:
    """The index of what is written; other metadata of the old one stays."""
    metadata = read_json_object(index.root / INDEX_NAME).get("metadata")
    kept = metadata if isinstance(metadata, dict) else {}
    weight_map = {name: tensor.file.name for name, tensor in sorted(index.tensors.items())}
    content = {"metadata": {**kept, "total_size": index.num_bytes}, "weight_map": weight_map}
    return json.dumps(content, indent=2) + "\n"


def _is_untouched(view: CheckpointView, file: Path, tensors: list[TensorInfo]) -> bool:
    reader = view.reader
    edited = isinstance(reader, Overlay) and any(reader.is_edited(tensor.name) for tensor in tensors)
    return not edited and read_header(file).keys() == {tensor.name for tensor in tensors}


def _copy(source: Path, target: Path) -> None:
    """A separate copy, never a link: who changes the one must not change the other."""
    with source.open("rb") as old, target.open("wb") as new:
        shutil.copyfileobj(old, new, COPY_BYTES)


def _write(view: CheckpointView, tensors: list[TensorInfo], target: Path) -> None:
    specs = [TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors]
    with target.open("wb") as file:
        file.write(header_bytes(specs))
        for tensor in tensors:
            data = view.reader.raw(tensor)
            assert len(data) == tensor.num_bytes, f"{tensor.name}: {len(data)} bytes, not {tensor.num_bytes}"
            file.write(data)
            view.reader.release([tensor])


def _write_config(index: SourceIndex, folder: Path) -> None:
    old = index.root / "config.json"
    if index.config == _read(old):
        shutil.copyfile(old, folder / old.name)
    else:
        write_text(folder / old.name, json.dumps(index.config, indent=2) + "\n")


def _read(path: Path) -> Mapping[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content
