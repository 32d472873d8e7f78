"""Exchange values between the ranks of torchrun.

A single process exchanges nothing and needs no torch.
All ranks must call each of these functions, in the same order.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

from vexport.errors import EnvironmentFault, first_line
from vexport.rules.environment import LOST_RANK

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Ranks wait this long for each other, because a rank may work for days. If a rank dies, torchrun
# ends the other ranks.
PATIENCE = timedelta(days=7)


class Addable(Protocol):
    """Value that supports addition."""

    def __add__(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Addable)


@contextmanager
def process_group() -> Iterator[None]:
    """Form a process group of torchrun's ranks inside the block, or use the existing group.

    If GPUs are available, each rank selects its GPU as the device "cuda". Raises EnvironmentFault
    if the connection to a rank is lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or rank_and_size()[1] > 1:
        yield
        return
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(timeout=PATIENCE)
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        lost = EnvironmentFault.of(LOST_RANK, "torchrun", message=first_line(error))
        raise lost from error
    finally:
        distributed.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a process group."""
    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def all_reduce(value: "torch.Tensor") -> None:
    """Replace a tensor by its sum over all ranks; its shape must be the same on all ranks."""
    if rank_and_size()[1] > 1:
        from torch import distributed

        distributed.all_reduce(value)


def broadcast(value: T, source: int = 0) -> T:
    """Return the value of the rank `source`. The value must support pickling."""
    if rank_and_size()[1] == 1:
        return value
    from torch import distributed

    values = [value]
    distributed.broadcast_object_list(values, src=source)
    return values[0]


def on_first(make: Callable[[], T]) -> T:
    """Call `make` only on the first rank, and return its value on all ranks."""
    return broadcast(make() if rank_and_size()[0] == 0 else cast(T, None))


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks."""
    return [broadcast(value, source) for source in range(rank_and_size()[1])]


def add_up(sums: dict[str, A]) -> None:
    """Replace each value by its sum over all ranks. A name may be missing on some ranks."""
    first, *others = gather(dict(sums))
    sums.clear()
    sums.update(first)
    for name, value in (item for other in others for item in other.items()):
        sums[name] = sums[name] + value if name in sums else value
