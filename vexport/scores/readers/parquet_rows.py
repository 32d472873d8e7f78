"""Read the rows of a parquet file in batches, with a limit on what the file expands to.

A value that is repeated is stored once in such a file. 48 kB can therefore expand to many GB.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vexport.errors import InputError, require_working_disk
from vexport.files import require_no_device
from vexport.records import Json
from vexport.rules import file as rules
from vexport.words import clip

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

LARGEST_CONTENT = 1 << 30
"""Most bytes of all rows of a file, and of its columns before repeated values are expanded."""
# Most bytes of a batch if each of its rows had the largest value that its column can have, and most
# rows of a batch.
_BATCH_BYTES, _BATCH_ROWS = 1 << 28, 1000


def parquet_rows(
    path: Path, columns: Sequence[str], need: str
) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield (place, row) for every row. The place is `file, row 1` and so on.

    `columns` are names of columns, also of fields in them (`doc.id`), which may be missing. `need`
    describes a valid file in errors.

    Raises:
        InputError: If the file is damaged, if it expands to too much, or if a value cannot be
            converted.
    """
    import pyarrow
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    require_no_device(path)
    try:
        with parquet.ParquetFile(path) as file:
            size, number = 0, 0
            for batch in file.iter_batches(_batch_rows(path, file, columns), columns=[*columns]):
                size += batch.nbytes
                _require_size(path, size)
                for row in _converted(batch, path, number, need):
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, KeyError, ValueError, OverflowError) as error:
        require_working_disk(error, path)
        raise InputError.of(
            rules.PARQUET, str(path), reason=_first_line(error), need=need
        ) from None


def _batch_rows(path: Path, file: "pyarrow.parquet.ParquetFile", columns: Sequence[str]) -> int:
    """Return the number of rows in a batch.

    A value has at most the size of its column in a group of rows.
    """
    prefixes = tuple(f"{column}." for column in columns)
    metadata, largest, stored = file.metadata, 1, 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if f"{column.path_in_schema}.".startswith(prefixes):
                largest = max(largest, column.total_uncompressed_size)
                stored += column.total_uncompressed_size
    _require_size(path, stored)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))


def _require_size(path: Path, size: int) -> None:
    if size > LARGEST_CONTENT:
        raise InputError.of(
            rules.TOO_LARGE, str(path), most=LARGEST_CONTENT >> 20, need="expanded rows"
        )


def _converted(
    batch: "pyarrow.RecordBatch", path: Path, before: int, need: str
) -> list[dict[str, Json]]:
    """`before` is the number of rows before the batch."""
    try:
        rows: list[dict[str, Json]] = batch.to_pylist()
    except (ValueError, OverflowError):
        for number in range(batch.num_rows):
            where = f"{path}, row {before + number + 1}"
            for name in batch.schema.names:
                _require_convertible(batch.column(name)[number], where, name, need)
        raise
    return rows


def _require_convertible(value: "pyarrow.Scalar", where: str, name: str, need: str) -> None:
    """Raise InputError for broken UTF-8, a time out of range, or a field that occurs twice."""
    try:
        value.as_py()
    except (ValueError, OverflowError) as error:
        reason = f"{name}: {_first_line(error)}"
        raise InputError.of(rules.PARQUET, where, reason=reason, need=need) from None


def _first_line(error: Exception) -> str:
    return clip(f"{type(error).__name__}: {error}".splitlines()[0], 200)
