"""Read rows of calibration data from files, lazily."""

import csv
import gzip
import io
import json
import mimetypes
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vexport.calibration.conversations import RowError
from vexport.calibration.rows import key_of_rows
from vexport.calibration.splits import TEXT, choose_split, data_suffix, mentions_split
from vexport.checkpoint.source import COMPRESSED
from vexport.errors import InputError, first_line, require_working_disk
from vexport.errors.extras import require_extra
from vexport.files import require_fetched
from vexport.foreign import LONGEST_LINE, parsed_number
from vexport.rules import calibration as rules
from vexport.rules import file

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    from _typeshed import WriteableBuffer

# Limit in bytes for a file that is a JSON list. A line or paragraph has at most LONGEST_LINE bytes.
# Without limits, a device file would be read forever.
LARGEST_LIST = 1 << 30
# Compressed data may expand to EXPANSION times the size of its file, and FREE_EXPANSION bytes. Text
# expands to less than that, and a small file that expands without end is refused.
EXPANSION, FREE_EXPANSION = 100, 1 << 24
# Separators of tables.
_TABLES: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
ARROW = ".arrow"
PARQUET = ".parquet"
BATCH_ROWS = 64
# Matches the first key of a JSON object if its value is a list of objects.
_FIRST_LIST = re.compile(rb'\{\s*"([^"]+)"\s*:\s*\[\s*[\[{]')
# Number of bytes read from the start of a file to detect its format, and maximum number of bytes
# parsed to detect a JSON object that spans several lines.
HEADER_BYTES, PARSED_BYTES = 4096, 1 << 26
_ARROW_FILE = b"ARROW1"
# File in a folder of pictures with a row for each picture, and its columns with names of files.
_METADATA = "metadata"
_FILE_NAME = re.compile(r"(?:(.+)_)?file_names?")
# Control characters that do not occur in text.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """An unparsed row: its place for messages, its number (from 1), and its content.

    `content` is a line of JSON, or a parsed record. `continues_previous` is True for paragraphs of
    a text file after the first paragraph. `file` is the local file with the row, if there is one.
    The row names pictures in the folder of this file.
    """

    place: str
    number: int
    content: bytes | object
    continues_previous: bool = False
    file: Path | None = None


def rows_of_file(path: Path, split: str | None) -> Iterator[RawRow]:
    require_fetched([path])
    suffix = data_suffix(path)
    if suffix in (PARQUET, ARROW):
        if path.suffix.lower() in COMPRESSED:
            raise InputError.of(rules.COMPRESSED, str(path), suffix=suffix, name=path.name)
        yield from _rows_of_batches(path)
        return
    try:
        with _open_file(path) as stream:
            _require_text(path, stream.peek(HEADER_BYTES)[:HEADER_BYTES])
            if suffix in TEXT:
                yield from _rows_of_text(path, stream)
            elif separator := _TABLES.get(suffix):
                yield from _rows_of_table(path, stream, separator)
            else:
                yield from _rows_of_json(path, stream, split)
    except OSError as error:
        require_working_disk(error, path)
        reason = error.strerror or error
        raise InputError.of(file.UNREADABLE, str(path), reason=reason) from None


def _open_file(path: Path) -> io.BufferedReader:
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return path.open("rb")
    if suffix == ".gz":
        stream = gzip.GzipFile(path)
    else:
        require_extra("pyarrow", "reading .zst")
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression="zstd", buffer_size=HEADER_BYTES)
    return io.BufferedReader(_Expanding(path, stream))


class _Expanding(io.RawIOBase):
    """Stream of a compressed file. Raises InputError if the file expands to far more than text."""

    def __init__(self, path: Path, stream: "gzip.GzipFile | pyarrow.NativeFile") -> None:
        self._path = path
        self._stream = stream
        self._left = EXPANSION * path.stat().st_size + FREE_EXPANSION

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read bytes into a buffer and return their number."""
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except (EOFError, zlib.error) as error:
            raise OSError(f"broken gzip data: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise InputError.of(rules.EXPANSION, str(self._path), times=EXPANSION)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()
        super().close()


def _rows_of_json(path: Path, stream: io.BufferedReader, split: str | None) -> Iterator[RawRow]:
    """Yield the rows of a file with JSON lines, with a list of objects, or with lists by split."""
    start = stream.peek(HEADER_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    first_key = _FIRST_LIST.match(start)
    has_splits = first_key and mentions_split(first_key[1].decode(errors="replace"))
    if has_splits or start[:1] == b"[":
        yield from _rows_of_lists(path, _parsed(path, stream), split)
        return
    is_first = True
    for number, line in _lines(path, stream):
        if not line.strip():
            continue
        if is_first:
            _require_json_lines(path, line)
            is_first = False
        yield RawRow(place=line_place(path, number), number=number, content=line)


def _rows_of_lists(
    path: Path, content: list[object] | Mapping[str, object], split: str | None
) -> Iterator[RawRow]:
    place, rows = str(path), content
    if isinstance(content, Mapping):
        lists = {name: rows for name, rows in content.items() if isinstance(rows, list)}
        name = choose_split(lists, split, place)
        place, rows = f"{path}: {name}", lists[name]
    for number, row in enumerate(rows, start=1):
        yield RawRow(place=f"{place}: item {number}", number=number, content=row)


def _require_json_lines(path: Path, first: bytes) -> None:
    """Raise InputError if the first line is not JSON but starts a JSON object of several lines."""
    if first.removeprefix(b"\xef\xbb\xbf").strip()[:1] != b"{":
        return
    try:
        json.loads(first, parse_int=parsed_number)
        return
    except UnicodeDecodeError:
        return
    except (ValueError, RecursionError):
        with _open_file(path) as stream:
            text = stream.read(PARSED_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    found, jq = "a JSON object that spans several lines", "."
    key = None if text[end:].strip() else key_of_rows(value)
    if key is not None:
        found = f"one JSON object with a list of {len(value[key]):,} objects under the key {key}"
        jq = f"'.{key}[]'"
    raise InputError.of(rules.JSON_LINES, str(path), found=found, filter=jq, name=path.name)


def _require_text(path: Path, start: bytes) -> None:
    """Raise a single InputError for the file if it does not begin like text in UTF-8."""
    if start.translate(None, _CONTROLS) != start:
        raise InputError.of(rules.TEXT, str(path), start=repr(start[:8]))


def line_place(path: Path, number: int) -> str:
    """Return the place of a line for messages. Lines are counted from 1."""
    return f"{path}: line {number}"


def json_problem(error: ValueError | RecursionError) -> str:
    """Describe JSON that cannot be parsed."""
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON, column {error.colno} ({error.msg})"
    return "JSON nested too deeply" if isinstance(error, RecursionError) else first_line(error)


def encoding_error(place: str, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError.of(rules.ENCODING, place, byte=byte, position=error.start)


def _lines(path: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            place = line_place(path, number)
            raise InputError.of(rules.LONG_ROW, place, most=LONGEST_LINE >> 20)
        yield number, line


def _parsed(path: Path, stream: BinaryIO) -> Any:
    text = stream.read(LARGEST_LIST + 1)
    if len(text) > LARGEST_LIST:
        raise InputError.of(rules.LONG_LIST, str(path), most=LARGEST_LIST >> 20)
    try:
        return json.loads(text, parse_int=parsed_number)
    except UnicodeDecodeError as error:
        raise encoding_error(str(path), error) from None
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        place = str(path) if line is None else line_place(path, line)
        raise InputError.of(rules.JSON, place, reason=json_problem(error)) from None


def _text_lines(path: Path, stream: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, line in _lines(path, stream):
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise encoding_error(line_place(path, number), error) from None
        yield number, text


def _rows_of_text(path: Path, stream: BinaryIO) -> Iterator[RawRow]:
    is_later = False
    for number, text in _paragraphs(path, stream):
        place, content = line_place(path, number), {"text": text}
        yield RawRow(place=place, number=number, content=content, continues_previous=is_later)
        is_later = True


def _paragraphs(path: Path, stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text, each with the blank line after it, and their last lines.

    A paragraph longer than LONGEST_LINE is yielded in parts.
    """
    lines, number, size, has_text = list[str](), 0, 0, False
    for number, line in _text_lines(path, stream):
        lines.append(line)
        size, has_text = size + len(line), has_text or bool(line.strip())
        if has_text and (not line.strip() or size >= LONGEST_LINE):
            yield number, "".join(lines)
            lines, size, has_text = [], 0, False
    if has_text:
        yield number, "".join(lines)


def _rows_of_table(path: Path, stream: BinaryIO, separator: str) -> Iterator[RawRow]:
    """Yield the rows of CSV or TSV. All values are text."""
    csv.field_size_limit(LONGEST_LINE)
    lines = (line for _, line in _text_lines(path, stream))
    table = csv.DictReader(lines, delimiter=separator, restval="", strict=True)
    try:
        for number, record in enumerate(table, start=1):
            if None in record:
                raise csv.Error(f"row {number} has more values than the header")
            yield RawRow(place=f"{path}: row {number}", number=number, content=record)
    except csv.Error as error:
        raise _broken_table(path, error) from None


def _rows_of_batches(path: Path) -> Iterator[RawRow]:
    """Yield the rows of parquet or Arrow as they are stored: pictures are not decoded."""
    require_extra("pyarrow", f"reading {path.suffix}")
    import pyarrow

    numbers = count(1)
    try:
        with closing(_batches(path)) as batches:
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    for record in batch.slice(start, BATCH_ROWS).to_pylist():
                        number = next(numbers)
                        yield RawRow(place=f"{path}: row {number}", number=number, content=record)
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken_table(path, error) from None


def _batches(path: Path) -> "Generator[pyarrow.RecordBatch]":
    import pyarrow
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    if path.suffix.lower() == PARQUET:
        with closing(parquet.ParquetFile(path)) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS)
        return
    with pyarrow.OSFile(str(path)) as stream:
        if stream.read(len(_ARROW_FILE)) == _ARROW_FILE:
            file = pyarrow.ipc.open_file(stream)
            yield from map(file.get_batch, range(file.num_record_batches))
        else:  # the format of `datasets`
            stream.seek(0)
            yield from pyarrow.ipc.open_stream(stream)


def _broken_table(path: Path, error: Exception) -> InputError:
    suffix = data_suffix(path)
    return InputError.of(rules.TABLE, str(path), reason=first_line(error), suffix=suffix)


def content_of(raw: RawRow) -> Any:
    """Return the parsed JSON of a line, or a record.

    In a file `metadata`, columns with names of files are replaced as `datasets` does for a folder
    of pictures. Raises RowError for a line that is not JSON, and InputError for a file that is not
    UTF-8.
    """
    content = _parsed_content(raw)
    is_metadata = raw.file is not None and raw.file.name.partition(".")[0] == _METADATA
    return _with_files(content) if is_metadata and isinstance(content, Mapping) else content


def _with_files(content: Mapping[object, object]) -> Mapping[object, object]:
    """Replace `file_name` by `image`, and `NAME_file_name` by `NAME`, with the files as values."""
    others: dict[object, object] = {}
    files: dict[object, object] = {}
    for key, value in content.items():
        names = value if isinstance(value, list) else [value]
        found = _FILE_NAME.fullmatch(key) if isinstance(key, str) else None
        if found is None or not all(isinstance(name, str) for name in names):
            others[key] = value
            continue
        stored = [{"bytes": None, "path": name} for name in names]
        kind = (mimetypes.guess_type(str(names[0]))[0] or "").partition("/")[0] if names else ""
        column = found[1] or (kind if kind in ("audio", "video") else "image")
        files[column] = stored if isinstance(value, list) else stored[0]
    return others | files


def _parsed_content(raw: RawRow) -> Any:
    if not isinstance(raw.content, bytes):
        return raw.content
    try:
        return json.loads(raw.content.rstrip(b"\r\n"), parse_int=parsed_number)
    except UnicodeDecodeError as error:
        raise encoding_error(raw.place, error) from None
    except (ValueError, RecursionError) as error:
        raise RowError(json_problem(error), rules.JSON_ROW) from None
