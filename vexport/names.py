"""Parse the name that a user gives to a model: a folder, a hub model, a server, or given results.

A name is parsed once: by click's types, by a scenario's fields, and by the functions of
`vexport.api`. Later code receives a `ModelRef`. The module is light, because help imports it.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vexport.errors import InputError
from vexport.rules import usage as rules

# As in huggingface_hub/utils/_validators.py, with a git branch, tag or commit after the @.
_HUB_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")
_ADDRESSES = ("http://", "https://")
ACCEPTED_KEY = "vexport_baseline"
"""Key of the version in the file of an accepted baseline."""
TIMESTAMP = re.compile(r"(\d{4}-\d{2}-\d{2}T[\d.-]+)\.json$")
"""End of a result file's name, with the date from lm-eval."""


class _Ref:
    """What all references have: text, a title for reports, and a name for files and folders."""

    __slots__ = ()

    @property
    def title(self) -> str:
        """Return the last part of the name."""
        return str(self)

    @property
    def file_name(self) -> str:
        """Return the title as the name of a folder."""
        return re.sub(r"[:/]", "-", self.title)


@dataclass(frozen=True, slots=True)
class _Local(_Ref):
    """A place on this machine. `text` is the name as the user gave it."""

    text: str
    path: Path

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the reference to a path."""
        return cls(str(path), path)

    def __str__(self) -> str:
        return self.text

    @property
    def title(self) -> str:
        """Return the last part of the path, also for `.` and `..`."""
        return Path(os.path.normpath(self.path.absolute())).name or self.text


class Folder(_Local):
    """The folder of a checkpoint. It may be missing."""

    __slots__ = ()


class ResultFiles(_Local):
    """A result file of lm-eval, or a folder with results."""

    __slots__ = ()


class AcceptedFile(_Local):
    """The file of an accepted baseline."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName(_Ref):
    """A model of the hub. `revision` is a branch, tag or commit, or None for the default branch."""

    id: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse ORG/NAME or ORG/NAME@REVISION. Return None for anything else.

        Local folders of that name are not considered.
        """
        match = _HUB_NAME.fullmatch(name)
        return cls(id=match["id"], revision=match["revision"]) if match else None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def title(self) -> str:
        """Return the name without the organization."""
        return str(self).partition("/")[2]

    @property
    def path(self) -> Path:
        """Return the path that a folder of this name has. Outputs must not be written there."""
        return Path(str(self))


@dataclass(frozen=True, slots=True)
class Server(_Ref):
    """A server that runs a model. The address need not be valid: `require_address` checks it."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def title(self) -> str:
        """Return the host and the port."""
        return self.url.partition("://")[2].split("/")[0] or self.url


SourceRef = Folder | HubName | Server
ModelRef = SourceRef | ResultFiles | AcceptedFile


def parse_source(name: str) -> SourceRef:
    """Parse the name of a checkpoint. An existing folder is never a hub model.

    In the name of a user who does not exist, `~` stays: there is no such folder.
    """
    if not name:
        raise InputError.of(rules.NAME, "a model's name", value=name)
    if name.startswith(_ADDRESSES):
        return Server(name)
    path = Path(name)
    with suppress(InputError):
        path = user_path(name)
    if not os.path.lexists(path):  # False also for a name that is too long
        if "://" in name:
            return Server(name)
        if hub := HubName.parse(name):
            return hub
    return Folder(name, path)


def parse_model(name: str) -> ModelRef:
    """Parse the name of a model to evaluate, which may also stand for results.

    A folder with a config.json is a checkpoint, even if it contains results.
    """
    source = parse_source(name)
    if isinstance(source, Server):
        return source
    path = source.path
    if _is_accepted(path):
        return AcceptedFile(name, path)
    if not os.path.lexists(path / "config.json") and result_files(path):
        return ResultFiles(name, path)
    return source


def user_path(name: str | Path) -> Path:
    """Return a path with the home folder in place of `~` or `~name`.

    If the path exists as it is, with a name that starts with `~`, it is returned unchanged.

    Raises:
        InputError: If there is no such user.
    """
    path = Path(name)
    if not str(name).startswith("~") or os.path.lexists(path):
        return path
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError.of(rules.NO_USER, str(name)) from None


def user_text(name: str) -> str:
    """Return text that may be a path, with the home folder in place of `~`.

    The path may also follow `METHOD=`, the method of speculative decoding.
    """
    method, equals, path = ("", "", name) if name.startswith("~") else name.partition("=")
    return f"{method}{equals}{user_path(path)}" if path.startswith("~") else name


def _is_accepted(path: Path) -> bool:
    if path.suffix != ".json" or not os.path.isfile(path):  # noqa: PTH113
        return False
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the reader of the file reports the damage
    return isinstance(content, dict) and ACCEPTED_KEY in content


def result_files(path: Path) -> list[Path]:
    """Return lm-eval's result files at a path.

    For a folder, return all result files at any depth, such as `results_DATE.json`. For a result
    file, return the file itself. The path may also be NAME.json, an argument of lm-eval's
    `--output_path` that does not exist as a file. Then return the files `NAME_DATE.json` next to
    it.
    """
    if path.is_dir():
        return [file for file in path.rglob("*.json") if _is_result(file)]
    if path.suffix == ".json" and not os.path.lexists(path):
        dated = [file for file in path.parent.glob("*.json") if _is_result(file)]
        return [file for file in dated if run_name(file) == path.stem]
    return [path] if _is_result(path) else []


def _is_result(file: Path) -> bool:
    return TIMESTAMP.search(file.name) is not None and file.is_file()


def run_name(file: Path) -> str:
    """Return the part of a result file's name before the date: `results`, or the run's name."""
    return TIMESTAMP.sub("", file.name).removesuffix("_")
