"""Digests of files: those of the weights in vexport.json, and lists that sha256sum writes."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import xxhash

from vexport.errors import InputError
from vexport.files import read_json_object, require_no_device, write_text
from vexport.outputs import RECIPE
from vexport.records import Json

# The key of vexport.json: the digest of each file of weights, as `digest_of` writes it.
DIGESTS = "digests"
# The key of vexport.json with facts about the source, and there the digest of its config and
# headers.
HEADERS = "headers"
HEADERS_DIGEST = "config_and_headers_sha256"
# The key of vexport.json that `repair` sets if it changed weights: they are not what the recipe
# makes.
REPAIRED = "repaired"
XXH3, SHA256 = "xxh3", "sha256"
# A line of sha256sum; of a name with a line break or a backslash, which begins with one, there is
# none.
_LINE = re.compile(r"(?P<hex>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_TAGGED = re.compile(r"SHA256 \((?P<name>.+)\) = (?P<hex>[0-9a-fA-F]{64})")


def digest_of(file: Path, algorithm: str = XXH3) -> str:
    """The digest of a file's bytes: `xxh3:` (64 bits) or `sha256:` and hexadecimal digits."""
    with file.open("rb", buffering=0) as stream:
        state = hashlib.file_digest(
            stream, hashlib.sha256 if algorithm == SHA256 else xxhash.xxh3_64
        )
    return f"{algorithm}:{state.hexdigest()}"


def recorded_digests(folder: Path) -> dict[str, str]:
    """File name -> digest as vexport.json of a checkpoint has it; empty where there is none.

    InputError where they are not names of files in the folder with digests.
    """
    file = folder / RECIPE
    recorded = read_json_object(file).get(DIGESTS, {}) if file.is_file() else {}
    if not isinstance(recorded, dict):
        raise _unreadable(f"{file}: {DIGESTS}", "no object")
    digests = {}
    for name, digest in recorded.items():
        if (
            not re.fullmatch(rf"{XXH3}:[0-9a-f]{{16}}", str(digest))
            or name != PurePosixPath(name).name
        ):
            raise _unreadable(f"{file}: {DIGESTS}.{name}", f"{digest!r}")
        digests[name] = str(digest)
    return digests


def named_digests(name: str | None, root: Path) -> dict[str, str] | None:
    """The digests of a list, or the checkpoint's own where vexport.json is named; None where
    nothing is.
    """
    if name is None or Path(name).name != RECIPE:
        return None if name is None else listed_digests(Path(name))
    digests = recorded_digests(root)
    if not digests:
        got, fix = f"no {DIGESTS}", "leave --digests out, or name a list that sha256sum wrote"
        raise InputError(
            str(root / RECIPE), got=got, need="a checkpoint that vexport wrote", fix=fix
        )
    return digests


def record_digests(folder: Path, digests: Mapping[str, str], *, repaired: bool = False) -> None:
    """Write the digests of a checkpoint's weight files into its vexport.json, in place of earlier
    digests.

    `repaired` records that the weights are not those that the recipe makes.
    """
    file = folder / RECIPE
    recipe: dict[str, Json] = read_json_object(file) if file.is_file() else {}
    if repaired:
        recipe[REPAIRED] = True
    write_text(
        file, json.dumps({**recipe, DIGESTS: dict(sorted(digests.items()))}, indent=2) + "\n"
    )


def listed_digests(file: Path) -> dict[str, str]:
    """Path -> digest of a list as sha256sum writes it, also with --tag.

    Paths are relative to the checkpoint. InputError names the line of a path that is not, or cannot
    be read. A pipe is refused: it may have no writer.
    """
    require_no_device(file)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise InputError(
            str(file), got=got, need="a list that sha256sum wrote", fix="check the path"
        ) from None
    digests = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line) or _TAGGED.fullmatch(line)
        if match is None:
            raise _unreadable(f"{file}:{number}", ascii(line[:80]))
        path = PurePosixPath(match["name"])
        if path.is_absolute() or ".." in path.parts:
            got, need = f"the path {ascii(match['name'])}", "a path inside the checkpoint"
            raise InputError(
                f"{file}:{number}", got=got, need=need, fix="run sha256sum in its folder"
            )
        digests[str(path)] = f"{SHA256}:{match['hex'].lower()}"
    if not digests:
        raise _unreadable(str(file), "no line")
    return digests


def _unreadable(where: str, got: str) -> InputError:
    need = "a digest and the name of a file"
    return InputError(
        where, got=got, need=need, fix="write it again, or take it from who made the checkpoint"
    )
