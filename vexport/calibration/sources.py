"""Read rows of calibration data from files and the hub, lazily."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from vexport.calibration.file_rows import RawRow, rows_of_file
from vexport.calibration.folders import read_folder
from vexport.calibration.splits import choose_split
from vexport.checkpoint.hub import (
    downloaded,
    is_hub_error,
    is_network_error,
    translate_error,
)
from vexport.checkpoint.source import DEFAULT_FILE, DataName, parse_data
from vexport.errors import InputError, first_line
from vexport.errors.extras import require_extra
from vexport.names import HubName
from vexport.records import CalibrationData
from vexport.rules import calibration as rules

T = TypeVar("T")
# The size of the shuffle buffer, as in a stream of `datasets`.
SHUFFLE_BUFFER = 10_000


def raw_rows(data: CalibrationData) -> Iterator[RawRow]:
    """Return the rows of a data set in their order, or shuffled if `data` has a seed.

    Raises InputError if the data cannot be read, and EnvironmentFault if the hub cannot be reached.
    """
    name = parse_data(data.name)
    if name.kind == "hub":
        rows = _rows_of_hub(data, name)
    else:
        path = DEFAULT_FILE if name.kind == "default" else name.path
        rows = _rows_of_path(path, data)
    return rows if data.seed is None else shuffled(rows, data.seed)


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yield the items of a stream in a random order that depends only on the seed.

    At most SHUFFLE_BUFFER items are in memory at a time.
    """
    generator, buffer = random.Random(seed), list[T]()
    for item in items:
        if len(buffer) < SHUFFLE_BUFFER:
            buffer.append(item)
            continue
        place = generator.randrange(SHUFFLE_BUFFER)
        yield buffer[place]
        buffer[place] = item
    generator.shuffle(buffer)
    yield from buffer


def _rows_of_path(path: Path, data: CalibrationData) -> Iterator[RawRow]:
    if path.is_file():
        for row in rows_of_file(path, data.split):
            yield replace(row, file=path)
        return
    if not path.is_dir():
        raise InputError.of(rules.PIPE if path.exists() else rules.NO_DATA, data.name)
    folder = read_folder(path, data.split, data.column)
    rows = ((file, row) for file in folder.files for row in rows_of_file(file, data.split))
    for number, (file, row) in enumerate(rows, start=1):
        yield replace(row, number=number, file=file)


def _rows_of_hub(data: CalibrationData, name: DataName) -> Iterator[RawRow]:
    """Yield the rows of a data set on the hub while they are downloaded."""
    require_extra("datasets", "reading a dataset from the hub")
    import datasets

    assert name.hub is not None
    copy = _downloaded(name.hub)
    path, revision = (copy, None) if copy else (name.hub.id, name.hub.revision)
    try:
        split = data.split or name.split
        if split is None:
            names = datasets.get_dataset_split_names(path, data.subset, revision=revision)
            split = choose_split(names, None, path)
        stream = datasets.load_dataset(
            path, data.subset, split=split, revision=revision, streaming=True
        )
        stored = stream.decode(False) if stream.features else stream  # pictures as their bytes
        for number, record in enumerate(stored, start=1):
            yield RawRow(place=f"{name.name} row {number}", number=number, content=record)
    except GeneratorExit:
        raise
    except Exception as error:
        if not copy and is_hub_error(error):
            raise translate_error(error, name.hub, "dataset") from None
        reason = first_line(error)
        raise InputError.of(rules.DATASET, f"dataset {name.hub}", reason=reason) from None


def _downloaded(hub: HubName) -> str | None:
    """Return the folder of an earlier `hf download` if the hub cannot be reached, otherwise None.

    Raises the hub's errors. `datasets` would retry several times before it raises them.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(hub.id, revision=hub.revision, timeout=20)
    except Exception as error:
        copy = downloaded(hub) if is_network_error(error) else None
        if copy is None:
            raise translate_error(error, hub, "dataset") from None
        return copy
    return None
