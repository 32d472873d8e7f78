"""Find the data files of a folder.

A folder is a data set: its documents, metadata and other splits are not read as data.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vexport.calibration.rows import is_row
from vexport.checkpoint.source import COMPRESSED, SUFFIXES, parse_data
from vexport.errors import InputError
from vexport.files import read_json_object
from vexport.records import CalibrationData
from vexport.records.values import join_limited, plural

# Formats of prose. In a folder with files in other formats, they are documents about the data.
TEXT = (".txt", ".md")
# First words of the names of documents in a folder that has only prose.
_DOCUMENTS = ("readme", "license", "licence", "copying", "notice")
# Files in a folder that `datasets.save_to_disk` wrote, for one split and for several splits.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Words in the names of files and folders that mean a split, as `datasets` reads them.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_WORD = re.compile(r"[^\W_\d]+")
# A JSON file with more bytes than this is data. Descriptions of data sets are shorter.
_LARGEST_METADATA = 1 << 26
# Number of bytes in which the first character of a JSON value is looked for.
_FIRST_BYTES = 64
# Maximum number of files that a note names.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Data files of a folder, sorted by name, and other files with a suffix of data files.

    `saved` is the folder of a split that `datasets.save_to_disk` wrote, or None.
    """

    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    saved: Path | None = None


def data_suffix(path: Path) -> str:
    """Return the suffix of the format: `.txt` of a.txt.gz. Compressed data is JSON lines if its
    name has no other suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in SUFFIXES else ".jsonl"


def data_files(data: CalibrationData) -> Sequence[Path]:
    """Return the local files that are read for a data set, in their order."""
    path = parse_data(data.name).path
    return read_folder(path, data.split).files if path.is_dir() else (path,)


def read_folder(folder: Path, split: str | None) -> Folder:
    """Find the data files of a folder and its subfolders.

    Files in hidden folders do not count. Without `split`, the files of the split `train` are read,
    and files whose names mention no split. If no file is named after `train`, all files are read.

    Raises InputError if there are no data files, if no file belongs to `split`, or if a file of a
    saved data set is outside of the folder.
    """
    if (folder / SAVED_SPLITS).is_file():
        splits = _saved_splits(folder)
        chosen = choose_split(splits, split, str(folder))
        return _saved_folder(folder / chosen)
    if (folder / SAVED).is_file():
        return _saved_folder(folder)
    found = [path for path in sorted(folder.rglob("*")) if _may_be_data(path, folder)]
    if not found:
        need = f"files that end in {', '.join(SUFFIXES)}"
        got = "a folder without data files"
        raise InputError(str(folder), got=got, need=need, fix="check the path")
    files = _of_split(_without_documents(found), folder, split)
    others = [path for path in found if path not in files]
    return Folder(files=tuple(files), others=tuple(others))


def require_data(data: CalibrationData) -> None:
    """Raise InputError if local data do not exist or contain no data files.

    No data is read, and the hub is not contacted.
    """
    name = data.name
    parsed = parse_data(name)
    if parsed.kind != "path":
        return
    path = parsed.path
    if not path.exists():
        need = "a file, a folder, a data set on the hub (ORG/NAME), or default"
        raise InputError(name, got="no such file", need=need, fix="check the path")
    if path.is_dir():
        read_folder(path, data.split)
    else:
        require_file(path)


def require_file(path: Path) -> None:
    """Raise InputError if a path is a pipe or a device.

    These can be read only once, and may never end.
    """
    if path.exists() and not path.is_file():
        fix = "write the text to a file"
        raise InputError(str(path), got="a pipe or a device", need="a file or a folder", fix=fix)


def notes_on_folder(data: CalibrationData) -> Iterable[str]:
    """Yield a note that names the files of a local folder that are not read."""
    name = parse_data(data.name)
    if name.kind != "path" or not name.path.is_dir():
        return
    others = read_folder(name.path, data.split).others
    if others:
        names = [path.relative_to(name.path).as_posix() for path in others]
        files = join_limited(names, ", ", _MAX_NAMED)
        yield f"{data.name}: {plural(len(others), 'file')} not read as data: {files}"


def choose_split(names: Iterable[str], wanted: str | None, where: str) -> str:
    """Return the split to read: `wanted`, else `train`, else the first that begins with train.

    Raises InputError if the data set does not have the split `wanted`.
    """
    known = list(names)
    if wanted is None:
        return min(known, key=lambda name: (name != "train", not name.startswith("train")))
    if wanted not in known:
        got = f"no split {wanted}"
        need = f"one of its splits: {', '.join(known)}"
        raise InputError(where, got=got, need=need, fix="correct calibration.split")
    return wanted


def names_split(text: str, split: str) -> bool:
    """Return True if a name contains a split as a word: `data/train-00000-of-00001.parquet`."""
    words = {word.lower() for word in _WORD.findall(text)}
    return bool(words.intersection(_SPLITS.get(split, ()))) or split in re.split(r"[/.\-]", text)


def mentions_split(text: str) -> bool:
    """Return True if a name contains any of the usual splits as a word."""
    return any(names_split(text, split) for split in _SPLITS)


def _may_be_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    is_hidden = any(part.startswith(".") for part in parts)
    return path.suffix.lower() in SUFFIXES and path.is_file() and not is_hidden


def _without_documents(files: Sequence[Path]) -> Sequence[Path]:
    """Return the files that hold rows, or all files if none does."""
    rows = [path for path in files if data_suffix(path) not in TEXT]
    if rows:
        data = rows if len(rows) == 1 else [path for path in rows if not _is_metadata(path)]
        return data or rows
    return [path for path in files if not path.stem.lower().startswith(_DOCUMENTS)] or files


def _is_metadata(path: Path) -> bool:
    """Return True if a file is a single JSON object without rows, such as dataset_infos.json."""
    if path.suffix.lower() != ".json" or path.stat().st_size > _LARGEST_METADATA:
        return False
    with path.open("rb") as file:
        if file.read(_FIRST_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
            return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, dict) or is_row(content):
        return False
    first = [items[0] for items in content.values() if isinstance(items, list) and items]
    return not any(map(is_row, first))


def _of_split(files: Sequence[Path], folder: Path, split: str | None) -> Sequence[Path]:
    names = {path: path.relative_to(folder).as_posix() for path in files}
    if split is not None:
        chosen = [path for path in files if names_split(names[path], split)]
        if not chosen:
            got = f"no file of the split {split}"
            need = f"a file or folder with {split} in its name"
            raise InputError(str(folder), got=got, need=need, fix="correct calibration.split")
        return chosen
    if not any(names_split(name, "train") for name in names.values()):
        return files
    return [
        path
        for path in files
        if names_split(names[path], "train") or not mentions_split(names[path])
    ]


def _saved_splits(folder: Path) -> Sequence[str]:
    splits = read_json_object(folder / SAVED_SPLITS).get("splits")
    names = splits if isinstance(splits, list) else []
    plain = [name for name in names if isinstance(name, str) and _is_inside(name)]
    if not plain or len(plain) < len(names):
        raise _not_saved(folder / SAVED_SPLITS, "splits that are not folders beside this file")
    return plain


def _saved_folder(folder: Path) -> Folder:
    """Return the files of a split that `datasets.save_to_disk` wrote."""
    state = read_json_object(folder / SAVED)
    listed = state.get("_data_files")
    names = [
        entry.get("filename") if isinstance(entry, dict) else None
        for entry in (listed if isinstance(listed, list) else ())
    ]
    files = [folder / name for name in names if isinstance(name, str) and _is_inside(name)]
    if not files or len(files) < len(names):
        raise _not_saved(folder / SAVED, "data files that are not in its folder")
    return Folder(files=tuple(files), saved=folder)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _not_saved(file: Path, got: str) -> InputError:
    need = "a data set as `datasets.save_to_disk` writes it"
    return InputError(str(file), got=got, need=need, fix="save the data set again")
