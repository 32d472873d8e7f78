"""Counts what would let the host wait for a GPU, also on a CPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose results the host reads.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
# Operations that read the number of True values if an index is a mask.
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")


class WaitCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that let the host wait for a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        has_mask = name in INDEXED and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        made = func(*args, **(kwargs or {}))
        if name in READS or has_mask or _is_copy_to_host(name, args, kwargs or {}, made):
            self.counts[name] += 1
        return made


def _is_copy_to_host(name: str, args: Any, kwargs: Any, made: torch.Tensor) -> bool:
    """Return True for a copy from another device to the CPU that is not asynchronous."""
    if name == "aten::copy_":
        target, source, *rest = args
        is_async = bool(rest and rest[0]) or bool(kwargs.get("non_blocking"))
    elif name == "aten::_to_copy":
        target, source = made, args[0]
        is_async = bool(kwargs.get("non_blocking"))
    else:
        return False
    return target.device.type == "cpu" != source.device.type and not is_async


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count inside the block. `Tensor.tolist` and `Tensor.cpu` count on every device."""
    counter = WaitCounter()

    def counting(name: str) -> Any:
        own = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counter.counts[name] += 1
            return own(self, *args, **kwargs)

        return patch.object(torch.Tensor, name, call)

    with counting("tolist"), counting("cpu"), counter:
        yield counter.counts
