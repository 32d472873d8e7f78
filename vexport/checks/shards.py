"""The files of a folder that vLLM loads, and whether they agree."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vexport.checkpoint.index import INDEX_NAME, read_header
from vexport.checkpoint.reader import same_bytes
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.files import read_json_object
from vexport.records import Finding, TensorInfo

NAME = "shards"
SHARD = re.compile(r"(?P<start>.*)-\d+(?P<of>-of-(?P<count>\d{1,9})\.safetensors)")
DESCRIPTION = "vLLM loads the files that the index means, and every tensor is in one of them only"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on safetensors files and the index.

    Source: filter_duplicate_safetensors_files (model_loader/weight_utils.py): with an index the files that it
    names, without one all files of the folder. Of two tensors of a name the one that is read last stays.
    """
    root = view.index.root
    if (root / INDEX_NAME).is_file():
        for tensor in view.index.repeated:
            yield _twice(view, tensor, view.index.tensors[tensor.name])
        first = {tensor.name: tensor for tensor in reversed(view.index.repeated)}
        yield from _index(view, {**view.index.tensors, **first})
        return
    places: dict[str, TensorInfo] = {}
    files = {file: read_header(file) for file in sorted(root.glob("*.safetensors"))}
    for header in files.values():
        for name, tensor in header.items():
            other = places.setdefault(name, tensor)
            if other is not tensor:
                unread = _is_remnant(other.file.name, files) and files[other.file].keys() <= header.keys()
                yield _twice(view, other, tensor, unread=unread)
    yield from _strays(view, places)


def _is_remnant(name: str, files: Mapping[Path, Mapping[str, TensorInfo]]) -> bool:
    """Return whether a file is a shard of several of which others are missing, as an older export leaves
    it."""
    shard = SHARD.fullmatch(name)
    if shard is None:
        return False
    several = sum(file.name.startswith(shard["start"]) and file.name.endswith(shard["of"]) for file in files)
    return several < int(shard["count"])


def _strays(view: CheckpointView, places: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Tensors of files next to model.safetensors; vLLM refuses names that its class does not have."""
    modules = () if view.layout is None or view.layout.unknown else view.layout.modules
    for name in sorted(places.keys() - view.index.tensors.keys()):
        module, _, parameter = name.rpartition(".")
        packed = parameter == "weight" and f"{module}.weight_packed" in view.index.tensors
        refused = packed or (bool(modules) and module not in modules)
        yield (error if refused else warning)(
            NAME,
            name,
            expected="one safetensors file, or an index of several",
            got=f"a tensor in {places[name].file.name}, which vLLM loads too",
            fix="remove the file that does not belong here, or write an index",
        )


def _twice(view: CheckpointView, first: TensorInfo, second: TensorInfo, *, unread: bool = False) -> Finding:
    """A tensor in two files; `unread` where the first file is a remnant, all of which the second has too."""
    got = f"one in {first.file.name} and one in {second.file.name}"
    expected = "each tensor in one file"
    if same_bytes(view.reader, first, view.reader, second):
        return warning(NAME, first.name, expected=expected, got=f"{got}, alike", fix="remove one")
    if unread:
        got = f"{got}, different, of which vLLM keeps the latter"
        return warning(NAME, first.name, expected=expected, got=got, fix=f"remove {first.file.name}")
    fix = "remove the wrong one: vLLM keeps the one that it happens to read last"
    return error(NAME, first.name, expected=expected, got=f"{got}, different", fix=fix)


def _index(view: CheckpointView, places: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """An index that is wrong in what vLLM does not read: only names of files count for it."""
    weight_map = read_json_object(view.index.root / INDEX_NAME).get("weight_map")
    listed = weight_map if isinstance(weight_map, dict) else {}
    whole = {name for name, file in listed.items() if Path(str(file)).is_absolute()}
    for names, got in (
        (listed.keys() - places.keys(), "no such tensor"),
        (whole, "a whole path, which only this machine has"),
        (places.keys() - listed.keys(), "no entry"),
        (
            {
                name
                for name in listed.keys() & places.keys() - whole
                if listed[name] != places[name].file.name
            },
            "it in another file",
        ),
    ):
        if names:
            where = f"{INDEX_NAME}: {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            expected = "an index that says in which file each tensor is"
            fix = "write the index again: other loaders than vLLM's follow it"
            yield warning(NAME, where, expected=expected, got=got, fix=fix)
