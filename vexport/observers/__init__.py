"""Observers: from tensors seen to scale, zero point and global scale.

Adding an observer is one new file (or class) and one line in `OBSERVERS`.
"""

from collections.abc import Mapping

from vexport.observers.args import ObserverArgs, OptionValue
from vexport.observers.base import Observer, QParamsDict
from vexport.observers.flatten import flatten_for_calibration
from vexport.observers.imatrix import IMatrixMSEObserver
from vexport.observers.importance import Importance
from vexport.observers.minmax import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from vexport.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from vexport.observers.tokens import get_observer_token_count

OBSERVERS: Mapping[str, type[Observer]] = {
    "memoryless_minmax": MemorylessMinMaxObserver,
    "static_minmax": StaticMinMaxObserver,
    "minmax": MinMaxObserver,
    "memoryless_mse": MemorylessMSEObserver,
    "mse": MovingAverageMSEObserver,
    "imatrix_mse": IMatrixMSEObserver,
    "nvfp4_expanded_mse": NVFP4ExpandedMSEObserver,
}


def load_observer(name: str, base_name: str, args: ObserverArgs) -> Observer:
    """The observer of that registry name for a tensor kind; ValueError lists the names."""
    return Observer.load_from_registry(name, base_name=base_name, args=args)


__all__ = [
    "OBSERVERS",
    "IMatrixMSEObserver",
    "Importance",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "ObserverArgs",
    "OptionValue",
    "QParamsDict",
    "StaticMinMaxObserver",
    "flatten_for_calibration",
    "get_observer_token_count",
    "load_observer",
]
