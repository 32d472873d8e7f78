"""A local folder for a checkpoint in object storage: its small files, and headers of weights before holes.

The folder is kept: what has not changed is not fetched again, and a run that was broken off finds files with
the times that it knows. `Reader` knows it by a file next to it, and gets the weights from the storage.
"""

import os
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vexport.checkpoint.header import MAX_HEADER_BYTES
from vexport.checkpoint.hub.files import side_files, weight_names
from vexport.checkpoint.index import INDEX_NAME, index_file_names
from vexport.checkpoint.remote.storage import Storage, Version
from vexport.errors import InputError
from vexport.files import atomic_path, digest_bytes, from_json, to_json, write_text
from vexport.types import OnProgress

# Most headers are shorter, and one request is then enough.
_FIRST_BYTES = 100_000
_WORKERS = 8
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where the files of a folder come from, and the version of each."""

    url: str
    files: Mapping[str, Version]

    def digest(self) -> str:
        """Of the versions of all files, wherever they lie."""
        return digest_bytes(repr(sorted(self.files.items())).encode())


def _marker(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.remote.json")


def is_url(name: str) -> bool:
    """Whether a source is named by a URL."""
    return _URL.match(name) is not None


def remote_of(folder: Path) -> Remote | None:
    """What a mirror says of itself; None of every other folder."""
    marker = _marker(folder)
    return from_json(Remote, marker) if marker.is_file() else None


def mirror(url: str, on_progress: OnProgress) -> Path:
    """The folder for a checkpoint's URL, brought up to date. Raises as `Storage`."""
    storage = Storage(url)
    root = _root(storage.url)
    root.mkdir(parents=True, exist_ok=True)
    versions = storage.versions()
    before = remote_of(root)
    known = before.files if before else {}
    small = side_files(versions)
    for name in small:
        if known.get(name) != versions[name] or not (root / name).is_file():
            _write(root / name, storage.read(name, 0, versions[name].size, versions[name]), None)
    weights = _weights(root, storage, versions)
    stage = f"headers of {storage.url}"
    on_progress(stage, 0, len(weights))

    def fetch(name: str) -> None:
        if known.get(name) != versions[name] or not (root / name).is_file():
            _write(root / name, _header(storage, name, versions[name]), versions[name].size)

    with ThreadPoolExecutor(_WORKERS) as pool:
        for done, _ in enumerate(pool.map(fetch, weights)):
            on_progress(stage, done + 1, len(weights))
    _remove_others(root, {*small, *weights})
    # Until now another process found the old marker, and with it objects that have changed.
    write_text(_marker(root), to_json(Remote(url=storage.url, files={**versions})))
    return root


def _root(url: str) -> Path:
    """Below the user's cache, a folder that tells of the URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    protocol, _, path = url.partition("://")
    parts = [protocol, *(re.sub(r"[^\w.=-]", "_", part) for part in path.split("/") if part.strip("."))]
    return cache / "vexport" / "remote" / Path(*parts)


def _weights(root: Path, storage: Storage, versions: Mapping[str, Version]) -> list[str]:
    """The files of weights. InputError where there are none, or the index names one that is missing."""
    names = weight_names(versions, index_file_names(root) if INDEX_NAME in versions else [])
    if not names:
        fix = "choose a folder with safetensors (pickled weights are never loaded)"
        raise InputError(storage.url, got="no safetensors file", need="weights", fix=fix)
    if missing := [name for name in names if name not in versions]:
        need, fix = "the shard that the index names", "upload it again"
        raise InputError(f"{storage.url}/{missing[0]}", got="no such object", need=need, fix=fix)
    if below := [name for name in names if "/" in name]:
        need, fix = "all next to config.json", "copy the model to a disk first"
        raise InputError(f"{storage.url}/{below[0]}", got="weights in a folder", need=need, fix=fix)
    return names


def _header(storage: Storage, name: str, version: Version) -> bytes:
    """The length of a header and the header; one that is no header's is left to whoever reads the file."""
    first = storage.read(name, 0, min(_FIRST_BYTES, version.size), version)
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else 0
    end = min(8 + length, version.size)
    if end <= len(first) or length > MAX_HEADER_BYTES:
        return first[:end]
    return first + storage.read(name, len(first), end, version)


def _write(file: Path, data: bytes, size: int | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file) as temporary, temporary.open("wb") as stream:
        stream.write(data)
        if size is not None:
            stream.truncate(size)


def _remove_others(root: Path, names: set[str]) -> None:
    """Remove what an earlier version of the checkpoint had."""
    for file in [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]:
        if str(file.relative_to(root)) not in names:
            file.unlink(missing_ok=True)
