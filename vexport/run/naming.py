"""Names of places as a report tells them: as short as they are true wherever the report is read."""

import re
from pathlib import Path

from vexport.checkpoint.hub import HubName, pinned_name

# The hub's cache: models--ORG--NAME/snapshots/REVISION (huggingface_hub.constants, REPO_ID_SEPARATOR).
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
# What a folder is called that is named after its role; the folder around it has the name.
_ROLES = {"model", "checkpoint", "source", "snapshot", "hf", "weights", "final", "main", "output"}


def portable(argument: str) -> str:
    """A word of a command line without the path of the current folder, of `--option=PATH` too."""
    here = f"{Path.cwd().as_posix().rstrip('/')}/"
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable(value)}"
    return argument.removeprefix(here) if len(here) > 1 else argument


def commit_of(root: Path) -> str | None:
    """The commit on the hub of a folder in the hub's cache; None of every other folder."""
    pinned = pinned_name(root)
    return pinned.partition("@")[2] if pinned else None


def source_name(source: str, root: Path) -> str:
    """Return a model's id on the hub where that is known, else the name of its folder.

    `source` is the name that the scenario gives, `root` the folder that it became.
    """
    for path in (source, root.as_posix()):
        if cached := _CACHED.search(path):
            return f"{cached[1]}/{cached[2]}"
    if not Path(source).expanduser().exists() and (model := HubName.parse(source)):
        return model.id
    parts = [part for part in root.resolve().parts if part != root.anchor]
    named = [part for part in parts if part.lower() not in _ROLES]
    return (named or parts or [source])[-1]
