"""Calibration on several ranks: the samples are split, the statistics are merged, all ranks agree."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from vexport.calibration.data import Samples
from vexport.calibration.watch import Watched
from vexport.observers import MinMaxObserver, Observer

T = TypeVar("T")
# What one rank's observer saw: low, high and the number of tokens; None where it saw nothing.
Seen = tuple[torch.Tensor, torch.Tensor, int] | None


@contextmanager
def process_group() -> Iterator[None]:
    """Within the block torchrun's ranks form a process group; one that exists already is used as it is."""
    needed = dist.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
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


def own_share(samples: Samples) -> Samples:
    """The samples that this rank runs: every size-th one, from the rank on."""
    rank, size = rank_and_size()
    return Samples(token_ids=samples.token_ids[rank::size], rows=samples.rows[rank::size])


def gather(value: T) -> list[T]:
    """The values of all ranks, in the order of the ranks; they must be of a kind that can be pickled."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value)
    return values


def sync(watched: Watched) -> None:
    """Give every rank the statistics of all ranks: minima and maxima exactly, moving averages as their mean.

    One exchange for all layers; a rank that saw nothing of a layer has no say in it.
    """
    if rank_and_size()[1] == 1:
        return
    ranges = gather([_seen(observer) for observer in watched.inputs.values()])
    for observer, parts in zip(watched.inputs.values(), zip(*ranges, strict=True), strict=True):
        _merge(observer, [part for part in parts if part is not None])
    totals = gather([(one.total, one.tokens) for one in watched.importance.values()])
    for one, sums in zip(watched.importance.values(), zip(*totals, strict=True), strict=True):
        known = [total for total, _ in sums if total is not None]
        one.total = torch.stack(known).sum(0) if known else None
        one.tokens = sum(tokens for _, tokens in sums)


def _seen(observer: Observer) -> Seen:
    return (*observer.range(), observer.tokens) if observer.has_statistics else None


def _merge(observer: Observer, parts: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    if not parts:
        return
    low, high = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    averaged = isinstance(observer, MinMaxObserver)
    observer.low = low.mean(0) if averaged else low.amin(0)
    observer.high = high.mean(0) if averaged else high.amax(0)
    observer.tokens = sum(tokens for _, _, tokens in parts)
