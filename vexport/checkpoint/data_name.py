"""Names of calibration data: a file or folder, a data set of the hub, one that vexport has."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vexport.checkpoint.hub import HubName
from vexport.errors import InputError

DEFAULT = "default"
# The text that ships with vexport.
DEFAULT_FILE = Path(__file__).resolve().parent.parent / "calibration" / "default.jsonl"
SUFFIXES = (".jsonl", ".json", ".txt", ".md", ".parquet", ".gz")
_HUB = re.compile(r"(?P<id>[^:]+)(?::(?P<split>[^:]*))?(?::(?P<column>[^:]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """A name with what it says: `path` of a file or folder, `hub` with a split and a column."""

    kind: Literal["path", "hub", "default"]
    name: str
    hub: HubName | None = None
    split: str | None = None
    column: str | None = None

    @property
    def path(self) -> Path:
        """The file or folder, of a name of that kind."""
        return Path(self.name).expanduser()


def parse_data(name: str) -> DataName:
    """The meaning of a name; what exists is a path, and what looks like nothing else is a missing one."""
    if name == DEFAULT:
        return DataName(kind="default", name=name)
    if Path(name).expanduser().exists():
        return DataName(kind="path", name=name)
    match = _HUB.fullmatch(name)
    hub = HubName.parse(match["id"]) if match else None
    if match and hub and not name.startswith((".", "~", "/")) and not name.endswith(SUFFIXES):
        return DataName(kind="hub", name=name, hub=hub, split=match["split"] or None, column=match["column"])
    return DataName(kind="path", name=name)


def require_data(name: str) -> None:
    """InputError where there are no such data, whether or not they would be read. The hub is not asked."""
    parsed = parse_data(name)
    if parsed.kind != "path":
        return
    path = parsed.path
    if not path.exists():
        need = "a file or folder, ORG/NAME of a data set on the hub, or default"
        raise InputError(name, got="no such file", need=need, fix="check the path")
    if path.is_dir():
        data_files(path)


def data_files(folder: Path) -> list[Path]:
    """The files with calibration data in a folder and below, by name. InputError where there is none."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    )
    if not files:
        need = f"files that end in {', '.join(SUFFIXES)}"
        raise InputError(str(folder), got="a folder without any", need=need, fix="check the path")
    return files
