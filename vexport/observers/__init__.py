"""Observers: from tensors seen to scale, zero point and global scale.

Adding an observer is one new file (or class) and one line in `OBSERVERS`.
"""

from collections.abc import Mapping

from vexport.observers.args import ObserverArgs
from vexport.observers.base import Observer, QParamsDict
from vexport.observers.flatten import flatten_for_calibration
from vexport.observers.minmax import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver

OBSERVERS: Mapping[str, type[Observer]] = {
    "memoryless_minmax": MemorylessMinMaxObserver,
    "static_minmax": StaticMinMaxObserver,
    "minmax": MinMaxObserver,
}


def load_observer(name: str, base_name: str, args: ObserverArgs) -> Observer:
    """The observer of that registry name for a tensor kind; ValueError lists the names."""
    if name not in OBSERVERS:
        raise ValueError(f"observer {name!r}: got an unknown name, need one of {', '.join(OBSERVERS)}")
    return OBSERVERS[name](base_name, args)


__all__ = [
    "OBSERVERS",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "Observer",
    "QParamsDict",
    "StaticMinMaxObserver",
    "flatten_for_calibration",
    "load_observer",
]
