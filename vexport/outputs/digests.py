"""Compute digests of files, keep them in vexport.json, and read the lists that sha256sum writes."""

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
# Line of sha256sum. Escaped names (with a line break or a backslash) are not supported.
_LINE = re.compile(r"(?P<hex>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_TAGGED = re.compile(r"SHA256 \((?P<name>.+)\) = (?P<hex>[0-9a-fA-F]{64})")


def digest_of(file: Path, algorithm: str = XXH3) -> str:
    """Return a file's digest: `xxh3:` (64 bits) or `sha256:`, followed by hexadecimal digits."""
    with file.open("rb", buffering=0) as stream:
        state = hashlib.file_digest(
            stream, hashlib.sha256 if algorithm == SHA256 else xxhash.xxh3_64
        )
    return f"{algorithm}:{state.hexdigest()}"


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
