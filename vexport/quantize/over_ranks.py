"""What torchrun's ranks agree on before they quantize together, and how they share the files out."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from vexport.calibration.ranks import from_each, gather, on_first, rank_and_size
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.writer import Shard
from vexport.errors import InputError
from vexport.files import write_text
from vexport.outputs import aside_folder
from vexport.quantize.parts import MadeFrom, dealt

_TOKEN = "shared"


def require_equal_inputs(own: MadeFrom, source: Path) -> None:
    """InputError on all ranks where one has another source, plan or settings than the first. All call."""
    rank, size = rank_and_size()
    everyone = gather((own, str(source)))
    for other, (made_from, place) in enumerate(everyone):
        if different := everyone[0][0].differences(made_from):
            raise InputError(
                f"rank {other} of {size}: {place}",
                got=f"another {different} than rank 0",
                need="the same on all ranks",
                fix="give all ranks the same files and arguments",
            )


def folder_and_share(
    folder: Path | None, shards: Sequence[Shard], index: SourceIndex
) -> tuple[Path, Sequence[Shard]]:
    """The first rank's working `folder`, which it alone passes, and the shards that this rank writes there.

    Ranks of hosts that do not see the folder write none. All call.
    """
    rank, _ = rank_and_size()
    token = secrets.token_hex(8)
    if folder is not None:
        write_text(aside_folder(folder) / _TOKEN, token)
    path, token = on_first(lambda: (str(folder), token))
    sees = rank == 0 or _reads(aside_folder(Path(path)) / _TOKEN) == token
    writers = [other for other, is_there in enumerate(gather(sees)) if is_there]
    return Path(path), dealt(shards, len(writers), index)[writers.index(rank)] if sees else ()


def written_by_all(write: Callable[[], None]) -> None:
    """Each rank writes its share; all raise the first VexportError, when all have ended. All call."""
    from_each(write)


def _reads(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
