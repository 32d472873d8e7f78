"""Calibration on several ranks: the samples are split, the statistics are merged, all ranks agree."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from vexport.calibration.attention import CachedStates
from vexport.calibration.watch import Watched
from vexport.errors import InputError, VexportError
from vexport.observers.ranks import count_over_ranks, reduction_device, sum_over_ranks

T = TypeVar("T")
Added = TypeVar("Added", torch.Tensor, CachedStates)


@contextmanager
def process_group() -> Iterator[None]:
    """Within the block torchrun's ranks form a process group; one that exists already is used as it is.

    With GPUs the device "cuda" is each rank's own then.
    """
    needed = dist.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if needed and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if needed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        if needed:
            dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are: (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: T) -> list[T]:
    """The values of all ranks, in the order of the ranks; they must be of a kind that can be pickled."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """An error of one rank, which is raised on all: exceptions with named arguments cannot be pickled."""

    kind: type[VexportError]
    where: str
    got: str
    need: str
    fix: str

    def error(self) -> VexportError:
        return self.kind(self.where, got=self.got, need=self.need, fix=self.fix)


def on_first(make: Callable[[], T]) -> T:
    """What `make` gives on the first rank, which alone runs it; all raise its VexportError."""
    rank, size = rank_and_size()
    return make() if size == 1 else _value(_broadcast(_outcome(make) if rank == 0 else None, 0))


def from_each(make: Callable[[], T]) -> list[T]:
    """What `make` gives on each rank, in their order; all raise the first VexportError. All ranks call."""
    _, size = rank_and_size()
    if size == 1:
        return [make()]
    own = _outcome(make)
    return [_value(one) for one in [_broadcast(own, source) for source in range(size)]]


def _outcome(make: Callable[[], T]) -> T | _Failed:
    try:
        return make()
    except VexportError as error:
        kind, where = type(error), error.where
        return _Failed(kind=kind, where=where, got=error.got, need=error.need, fix=error.fix)


def _broadcast(value: T, source: int) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def _value(outcome: T | _Failed | None) -> T:
    if isinstance(outcome, _Failed):
        raise outcome.error()
    return outcome  # type: ignore[return-value]


def in_row_order(found: Sequence[tuple[int, T]]) -> list[T]:
    """What all ranks found of their rows, given with the numbers of those, in the order of the rows."""
    everywhere = [item for one in gather(list(found)) for item in one]
    return [value for _, value in sorted(everywhere, key=lambda item: item[0])]


def require_same_weights(root: Path, own: dict[str, int]) -> None:
    """InputError on all ranks where one has read other bytes of a tensor; `own` are emptied. All call."""
    rank, size = rank_and_size()
    everyone = gather((root, dict(own)))
    own.clear()
    first: dict[str, tuple[int, int]] = {}
    for other, (place, checksums) in enumerate(everyone):
        for name, checksum in checksums.items():
            known, reader = first.setdefault(name, (checksum, other))
            if checksum != known:
                raise InputError(
                    f"rank {other} of {size}: {place}",
                    got=f"other bytes in {name} than rank {reader}",
                    need="the same source on all ranks",
                    fix="copy the model to that host again",
                )


def sync(watched: Watched) -> None:
    """Give every rank the statistics that one process would have.

    Every rank calls it, also one that saw nothing.
    """
    if rank_and_size()[1] == 1:
        return
    device = reduction_device()
    for observer in watched.inputs.values():
        if observer.low is not None and observer.high is not None:
            observer.low, observer.high = observer.low.to(device), observer.high.to(device)
        observer.sync_activation_stats()
    for gathered in watched.importance.values():
        gathered.total = sum_over_ranks(gathered.total.to(device))
        gathered.tokens = count_over_ranks(gathered.tokens)
    add_up(watched.routed)
    if watched.cached is not None:
        add_up(watched.cached)


def add_up(found: dict[str, Added]) -> None:
    """Replace what this rank found by the sum over all ranks, in the order in which names first come."""
    everywhere = [item for one in gather(dict(found)) for item in one.items()]
    found.clear()
    for name, value in everywhere:
        found[name] = found[name] + value if name in found else value
