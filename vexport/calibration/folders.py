"""Find the data files of a folder.

A folder is a data set: its documents, metadata and other splits are not read as data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vexport.calibration.file_rows import content_of, rows_of_file
from vexport.calibration.rows import is_row
from vexport.calibration.splits import (
    TEXT,
    choose_split,
    data_suffix,
    mentions_split,
    names_split,
)
from vexport.checkpoint.source import SUFFIXES, parse_data
from vexport.errors import InputError, VexportError
from vexport.files import read_json_object
from vexport.foreign import parsed_number
from vexport.records import CalibrationData
from vexport.records.values import join_limited
from vexport.rules import calibration as rules
from vexport.words import plural

# First words of the names of documents in a folder that has only prose.
_DOCUMENTS = ("readme", "license", "licence", "copying", "notice")
# Files in a folder that `datasets.save_to_disk` wrote, for one split and for several splits.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# A file with more bytes than this is data. Descriptions of data sets are shorter.
_LARGEST_METADATA = 1 << 26
# Maximum number of files that a note names.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Data files of a folder in their order, and other files with a suffix of data files."""

    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()


def data_files(data: CalibrationData) -> Sequence[Path]:
    """Return the local files that are read for a data set, in their order."""
    path = parse_data(data.name).path
    return read_folder(path, data.split, data.column).files if path.is_dir() else (path,)


def read_folder(folder: Path, split: str | None, column: str | None = None) -> Folder:
    """Find the data files of a folder and its subfolders: files whose first row holds text.

    Files in hidden folders do not count. Without `split`, the files of the split `train` are read,
    and files whose names mention no split. If no file is named after `train`, all files are read.

    Raises InputError if there are no data files, if no file belongs to `split`, or if a file of a
    saved data set is outside of the folder.
    """
    if (splits := folder / SAVED_SPLITS).is_file():
        names = _names_inside(splits, read_json_object(splits).get("splits"))
        folder /= choose_split(names, split, str(folder))
    if (saved := folder / SAVED).is_file():
        listed = read_json_object(saved).get("_data_files")
        entries = listed if isinstance(listed, list) else []
        names = _names_inside(
            saved, [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
        )
        return Folder(files=tuple(folder / name for name in names))
    found = [path for path in sorted(folder.rglob("*")) if _may_be_data(path, folder)]
    if not found:
        raise InputError.of(rules.EMPTY_FOLDER, str(folder), suffixes=", ".join(SUFFIXES))
    files = _of_split(_without_documents(found, column), folder, split)
    others = [path for path in found if path not in files]
    return Folder(files=tuple(files), others=tuple(others))


def notes_on_folder(data: CalibrationData) -> Iterable[str]:
    """Yield a note that names the files of a local folder that are not read."""
    name = parse_data(data.name)
    if name.kind != "path" or not name.path.is_dir():
        return
    others = read_folder(name.path, data.split, data.column).others
    if others:
        names = [path.relative_to(name.path).as_posix() for path in others]
        files = join_limited(names, ", ", _MAX_NAMED)
        yield f"{data.name}: {plural(len(others), 'file')} not read as data: {files}"


def _may_be_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    is_hidden = any(part.startswith(".") for part in parts)
    return path.suffix.lower() in SUFFIXES and path.is_file() and not is_hidden


def _without_documents(files: Sequence[Path], column: str | None) -> Sequence[Path]:
    """Return the files whose rows hold text, else the prose, or all files if there is none.

    If a column is named, prose is not read instead of rows.
    """
    tables = [path for path in files if data_suffix(path) not in TEXT]
    data = [path for path in tables if _holds_text(path, column)]
    if data or (tables and column is not None):
        return data or tables
    prose = [path for path in files if path not in tables]
    texts = [path for path in prose if not path.stem.lower().startswith(_DOCUMENTS)]
    return texts or tables or prose


def _holds_text(path: Path, column: str | None) -> bool:
    """Return True if the first row of a file can be turned into text.

    A file that cannot be read counts as data, so that its error is reported. A JSON object over
    several lines is a row.
    """
    if path.stat().st_size > _LARGEST_METADATA:
        return True
    try:
        first = next(rows_of_file(path, None), None)
        content = None if first is None else content_of(first)
    except (VexportError, ValueError, RecursionError):
        try:
            content = json.loads(path.read_bytes(), parse_int=parsed_number)
        except (OSError, ValueError, RecursionError):
            return True
    lists = content.values() if isinstance(content, Mapping) else ()
    rows = [content, *(items[0] for items in lists if isinstance(items, list) and items)]
    return any(is_row(row, column) for row in rows)


def _of_split(files: Sequence[Path], folder: Path, split: str | None) -> Sequence[Path]:
    names = {path: path.relative_to(folder).as_posix() for path in files}
    if split is not None:
        chosen = [path for path in files if names_split(names[path], split)]
        if not chosen:
            raise InputError.of(rules.SPLIT_OF_FOLDER, str(folder), split=split)
        return chosen
    if not any(names_split(name, "train") for name in names.values()):
        return files
    return [
        path
        for path in files
        if names_split(names[path], "train") or not mentions_split(names[path])
    ]


def _names_inside(file: Path, value: object) -> list[str]:
    """Return the names of files or folders that a saved data set lists.

    Raises InputError if they are not in the folder of `file`.
    """
    names = value if isinstance(value, list) else []
    inside = [name for name in names if isinstance(name, str) and _is_inside(name)]
    if not inside or len(inside) < len(names):
        raise InputError.of(rules.SAVED, str(file))
    return inside


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
