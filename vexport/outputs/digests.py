"""Compute digests of files, keep them in vexport.json, and read lists of sha256sum and the hub."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import xxhash

from vexport.errors import InputError
from vexport.files import read_json_object, require_no_device, write_text
from vexport.outputs import RECIPE
from vexport.records import Json
from vexport.rules import file as file_rules
from vexport.rules import outputs as rules

# Key of vexport.json for the digest of each weight file, in the format of `digest_of`.
DIGESTS = "digests"
# Key of vexport.json for an object with facts about the source, and the key in this object for the
# digest of the source's config and headers.
HEADERS = "headers"
HEADERS_DIGEST = "config_and_headers_sha256"
# Key of vexport.json that `repair` sets if it changed weights. The weights then differ from the
# recipe's result.
REPAIRED = "repaired"
XXH3, SHA256 = "xxh3", "sha256"
# Digest of a git blob: SHA-1 of `blob SIZE`, a zero byte and the content. The hub uses it for files
# outside LFS.
GIT = "git"
_BUFFER_BYTES = 1 << 20
_MOST_LINKS = 40  # as in Linux
# Folder in which huggingface_hub records the files of a download with `--local-dir`.
_DOWNLOADS = Path(".cache", "huggingface", "download")
# Line of sha256sum. Escaped names (with a line break or a backslash) are not supported.
_LINE = re.compile(r"(?P<hex>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_TAGGED = re.compile(r"SHA256 \((?P<name>.+)\) = (?P<hex>[0-9a-fA-F]{64})")


def _ignore(count: int) -> None:
    pass


def digest_of(file: Path, algorithm: str = XXH3, on_read: Callable[[int], None] = _ignore) -> str:
    """Return a file's digest: `xxh3:` (64 bits), `sha256:` or `git:`, and hexadecimal digits.

    `on_read` receives the number of bytes after each read. It may raise an exception to stop.
    """
    with file.open("rb", buffering=0) as stream:
        state = xxhash.xxh3_64() if algorithm == XXH3 else hashlib.sha256()
        if algorithm == GIT:
            state = hashlib.sha1(usedforsecurity=False)
            state.update(f"blob {os.fstat(stream.fileno()).st_size}\0".encode())
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while count := stream.readinto(buffer):
            state.update(buffer[:count])
            on_read(count)
    return f"{algorithm}:{state.hexdigest()}"


def hub_digests(root: Path) -> dict[str, str | None]:
    """Return the hub's digest of each file in a download, or None for a file without a digest.

    In huggingface_hub's cache, a file is a link to a blob. The blob's name is the digest. In a
    folder of `--local-dir`, the digest is in the metadata of the file. huggingface_hub's own reader
    ignores this metadata if the file changed later, so it is not used.

    Raises InputError if no file has a digest.
    """
    names = {*_downloaded(root), *_recorded(root)}
    found = {name: _hub_digest(root, name) for name in sorted(names)}
    if not any(found.values()):
        raise InputError.of(rules.NO_HUB_DIGESTS, str(root))
    return found


def _downloaded(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118


def _recorded(root: Path) -> Iterator[str]:
    """Yield the files that a download with `--local-dir` has written, also deleted ones."""
    downloads = root / _DOWNLOADS
    for file in downloads.rglob("*.metadata"):
        yield str(file.relative_to(downloads).with_suffix(""))


def _hub_digest(root: Path, name: str) -> str | None:
    path = root / name
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
        if path.parent.name == "blobs":
            return _from_etag(path.name)
    real = root.resolve()
    for folder in (real, *real.parents):
        recorded = folder / _DOWNLOADS / f"{(real / name).relative_to(folder)}.metadata"
        if recorded.is_file():
            lines = recorded.read_text(encoding="utf-8", errors="replace").splitlines()
            return _from_etag(lines[1].strip()) if len(lines) > 1 else None
    return None


def _from_etag(etag: str) -> str | None:
    """Return the digest in an ETag of the hub, or None for an ETag of another kind."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag):
        return None
    return f"{SHA256 if len(etag) == 64 else GIT}:{etag}"


def recorded_digests(folder: Path) -> dict[str, str]:
    """Return the digests in a checkpoint's vexport.json by file name, or an empty dictionary.

    Raises InputError unless vexport.json maps names of files in the folder to digests.
    """
    file = folder / RECIPE
    recorded = read_json_object(file).get(DIGESTS, {}) if file.is_file() else {}
    if not isinstance(recorded, dict):
        raise InputError.of(
            rules.DIGEST, f"{file}: {DIGESTS}", value="a value that is not an object"
        )
    digests = {}
    for name, digest in recorded.items():
        if (
            not re.fullmatch(rf"{XXH3}:[0-9a-f]{{16}}", str(digest))
            or name != PurePosixPath(name).name
        ):
            raise InputError.of(
                rules.DIGEST, f"{file}: {DIGESTS}.{name}", value=json.dumps(digest)[:80]
            )
        digests[name] = str(digest)
    return digests


def named_digests(name: str | None, root: Path) -> dict[str, str] | None:
    """Return the digests in the list `name`, or the recorded digests if `name` is a vexport.json.

    Returns None if `name` is None. Raises InputError if the checkpoint has no recorded digests.
    """
    if name is None or Path(name).name != RECIPE:
        return None if name is None else listed_digests(Path(name))
    digests = recorded_digests(root)
    if not digests:
        raise InputError.of(rules.NO_DIGESTS, str(root / RECIPE), key=DIGESTS)
    return digests


def require_list(name: str) -> None:
    """Raise InputError if a list of digests does not exist."""
    if Path(name).name != RECIPE and not Path(name).exists():
        listed_digests(Path(name))  # it raises the error for a missing file


def record_digests(folder: Path, digests: Mapping[str, str], *, repaired: bool = False) -> None:
    """Write the digests of weight files to a checkpoint's vexport.json, replacing earlier ones.

    `repaired` records that the weights differ from the recipe's result.
    """
    file = folder / RECIPE
    recipe: dict[str, Json] = read_json_object(file) if file.is_file() else {}
    if repaired:
        recipe[REPAIRED] = True
    write_text(
        file, json.dumps({**recipe, DIGESTS: dict(sorted(digests.items()))}, indent=2) + "\n"
    )


def listed_digests(file: Path) -> dict[str, str]:
    """Return the digests by path in a list that sha256sum wrote, with or without --tag.

    Paths must be relative to the checkpoint. Raises InputError with the line number if a path is
    not, or if a line cannot be parsed. A pipe is refused, because it may have no writer.
    """
    require_no_device(file)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError.of(file_rules.MISSING, str(file)) from None
        raise InputError.of(rules.DIGEST_LIST, str(file), reason=error) from None
    digests = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line) or _TAGGED.fullmatch(line)
        if match is None:
            raise InputError.of(rules.DIGEST, f"{file}:{number}", value=ascii(line[:80]))
        path = PurePosixPath(match["name"])
        if path.is_absolute() or ".." in path.parts:
            place = f"{file}:{number}"
            raise InputError.of(rules.DIGEST_PATH, place, path=ascii(match["name"]))
        digests[str(path)] = f"{SHA256}:{match['hex'].lower()}"
    if not digests:
        raise InputError.of(rules.DIGEST, str(file), value="an empty list")
    return digests
