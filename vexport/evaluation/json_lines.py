"""Read files with a JSON object on each line."""

import json
from collections.abc import Iterator
from pathlib import Path

from vexport.errors import InputError, require_working_disk
from vexport.files import require_no_device
from vexport.records import Json
from vexport.records.values import json_type


def json_lines(path: Path, need: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield (file:line, JSON object) for every line. `need` describes a valid line in errors.

    Raises:
        InputError: If the file cannot be read, or a line is not a JSON object.
    """
    require_no_device(path)
    fix = "restore the file or evaluate again"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    value: Json = json.loads(line)
                except (ValueError, RecursionError) as error:
                    got = f"broken JSON ({error})"
                    raise InputError(where, got=got, need=need, fix=fix) from None
                if not isinstance(value, dict):
                    raise InputError(
                        where, got=f"{json_type(value)} instead of an object", need=need, fix=fix
                    )
                yield where, value
    except OSError as error:
        require_working_disk(error, path)
        got = error.strerror or str(error)
        raise InputError(
            str(path), got=got, need="a file that can be read", fix="check it"
        ) from None
