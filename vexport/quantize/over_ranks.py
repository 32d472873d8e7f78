"""What torchrun's ranks agree on before they quantize together, and how they share the files out."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from vexport.calibration.ranks import from_each, gather, on_first, rank_and_size
from vexport.checkpoint.dtypes import BITS
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.writer import Shard, WriteUnit
from vexport.errors import InputError
from vexport.files import digest_bytes, write_text
from vexport.outputs import aside_folder
from vexport.types import AttentionLayer, Plan, TensorInfo

_TOKEN = "shared"


def require_equal_inputs(index: SourceIndex, plan: Plan, settings: object) -> None:
    """InputError on all ranks where one has another config, plan or settings than the first. All call."""
    _, size = rank_and_size()
    made_from = (index.config, plan.groups, plan.attention, plan.kv_cache, plan.smoothing, settings)
    everyone = gather((digest_bytes(repr(made_from).encode()), str(index.root)))
    for rank, (digest, source) in enumerate(everyone):
        if digest != everyone[0][0]:
            raise InputError(
                f"rank {rank} of {size}: {source}",
                got="another source, plan or settings than rank 0",
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


def dealt(shards: Sequence[Shard], count: int, index: SourceIndex) -> list[tuple[Shard, ...]]:
    """The shards dealt to so many writers: the largest first, each to the one with least to read."""
    work = [sum(_bytes_read(unit, index) for unit in shard.units) for shard in shards]
    loads, owners = [0] * count, dict[int, int]()
    for number in sorted(range(len(shards)), key=lambda number: -work[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += work[number]
    return [
        tuple(shard for number, shard in enumerate(shards) if owners[number] == owner)
        for owner in range(count)
    ]


def _bytes_read(unit: WriteUnit, index: SourceIndex) -> int:
    """The bytes of the source that a unit is made of."""
    if isinstance(unit.source, TensorInfo):
        return unit.source.num_bytes
    if isinstance(unit.source, AttentionLayer):
        return 0
    return sum(
        member.out_features * member.in_features * BITS[index.tensors[member.weight].dtype] // 8
        for member in unit.source.members
    )


def written_by_all(write: Callable[[], None]) -> None:
    """Each rank writes its share; all raise the first VexportError, when all have ended. All call."""
    from_each(write)


def _reads(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
