"""The file of a checkpoint that a finding is about, as an annotation names it: from the workspace's root."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.types import Finding, Json

CONFIG = "config.json"
# What is looked through for the line of a key; a config is a few kilobytes.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file, relative to the workspace with `/`, and a line from 1; 0 where no line is known."""

    file: str
    line: int = 0


def place_of(checkpoint: str, finding: Finding) -> Place | None:
    """Where a finding on `checkpoint` belongs; None where that is no folder or lies outside the workspace.

    The file that the finding names, else the weights that hold the tensor, else config.json.
    """
    root = _folder(checkpoint)
    if root is None:
        return None
    name, _, key = finding.where.partition(": ")
    file = _named(root, name) or _weights(root, finding.where) or root / CONFIG
    return in_workspace(file, _line(file, key))


def in_workspace(file: Path, line: int = 0) -> Place | None:
    """A file as GitHub names it; None outside GITHUB_WORKSPACE, or outside the current folder without one."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    absolute = file.absolute()
    if not absolute.is_relative_to(workspace):
        absolute = file.resolve()
    if not absolute.is_relative_to(workspace):
        return None
    return Place(file=absolute.relative_to(workspace).as_posix(), line=line)


def _folder(checkpoint: str) -> Path | None:
    """The folder, also of a name that says in brackets how the checkpoint was loaded."""
    for name in (checkpoint, checkpoint.rpartition(" (")[0]):
        try:
            if name and Path(name).is_dir():
                return Path(name)
        except (OSError, ValueError):
            continue
    return None


def _named(root: Path, name: str) -> Path | None:
    """The file of the checkpoint that a place begins with, as it is or relative to the folder."""
    for path in (Path(name), root / name):
        try:
            if path.is_file() and path.resolve().is_relative_to(root.resolve()):
                return path
        except (OSError, ValueError):
            continue
    return None


def _weights(root: Path, where: str) -> Path | None:
    """The file that holds the tensor or layer `where`, else one with its neighbours, else the index."""
    if "." not in where or "/" in where or " " in where.strip():
        return None
    index = min(root.glob("*.safetensors.index.json"), default=None)
    if index is None:
        return min(root.glob("*.safetensors"), default=None)
    files = _weight_map(index)
    name = where
    while name:
        for tensor, file in files.items():
            if tensor == name or tensor.startswith(f"{name}."):
                return root / str(file)
        name = name.rpartition(".")[0]
    return index


def _weight_map(index: Path) -> Mapping[str, Json]:
    try:
        files = read_json_object(index).get("weight_map")
    except InputError:
        return {}
    return files if isinstance(files, dict) else {}


def _line(file: Path, key: str) -> int:
    """The line of the last key of the path `key` in a JSON file; 0 where there is none."""
    if file.suffix != ".json" or not key:
        return 0
    quoted = json.dumps(key.split(" ")[0].rpartition(".")[2])
    try:
        with file.open("rb") as stream:
            lines = stream.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return 0
    return next((number for number, text in enumerate(lines, 1) if quoted in text), 0)
