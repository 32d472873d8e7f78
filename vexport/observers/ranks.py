"""Statistics reduced over the ranks of torch.distributed; a rank that saw nothing takes part."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import distributed

Range = tuple[torch.Tensor, torch.Tensor]
Reduction = Literal["extremes", "average"]


def is_distributed() -> bool:
    """Whether there is a process group."""
    return distributed.is_available() and distributed.is_initialized()


def reduce_range(low: torch.Tensor | None, high: torch.Tensor | None) -> Range | None:
    """MIN and MAX of all ranks' ranges, None where no rank has one.

    Ranks without a range change nothing. Every rank must call. Raises ValueError where shapes differ.
    """
    own = None if low is None else (tuple(low.shape), low.dtype)
    everyone: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    seen = [one for one in everyone if one is not None]
    if not seen:
        return None
    if len(set(seen)) > 1:
        raise ValueError(
            f"statistics over ranks: got {sorted(map(str, set(seen)))}, need one shape and dtype"
        )
    shape, dtype = seen[0]
    return (
        _reduced(low, shape, torch.inf, distributed.ReduceOp.MIN).to(dtype),
        _reduced(high, shape, -torch.inf, distributed.ReduceOp.MAX).to(dtype),
    )


def in_order(observed: Sequence[tuple[int, Range]]) -> list[Range]:
    """The ranges that all ranks saw, given with their positions, in that order. Every rank must call."""
    own = [(position, (low.cpu(), high.cpu())) for position, (low, high) in observed]
    everyone = [own] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    seen = sorted((one for found in everyone for one in found), key=lambda one: one[0])
    device = reduction_device()
    return [(low.to(device), high.to(device)) for _, (low, high) in seen]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """SUM of all ranks' tensors of one shape and dtype; the argument is left alone."""
    total = value.clone()
    distributed.all_reduce(total, op=distributed.ReduceOp.SUM)
    return total


def count_over_ranks(count: int) -> int:
    """The sum of all ranks' counts."""
    return int(sum_over_ranks(torch.tensor(count, device=reduction_device())))


def reduction_device() -> torch.device:
    """Where the backend reduces tensors."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def _reduced(
    value: torch.Tensor | None, shape: tuple[int, ...], empty: float, op: "distributed.ReduceOp.RedOpType"
) -> torch.Tensor:
    # Not every backend reduces 16-bit floats; float32 holds them exactly.
    total = torch.full(shape, empty) if value is None else value.to(torch.float32, copy=True).contiguous()
    total = total.to(reduction_device() if value is None else value.device)
    distributed.all_reduce(total, op=op)
    return total
