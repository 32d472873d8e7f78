"""Observers: from tensors seen to scale, zero point and global scale.

Adding an observer is one new file here and one entry in `vexport.records.observer_names`.
"""

from collections.abc import Mapping
from importlib import import_module

from vexport.observers.base import Observer, QParamsDict
from vexport.observers.flatten import flatten_for_calibration, get_observer_token_count
from vexport.observers.imatrix import IMatrixMSEObserver, Importance, NVFP4ExpandedIMatrixObserver
from vexport.observers.minmax import MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver
from vexport.observers.model_fusion import fuse_weight_observers
from vexport.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver, NVFP4ExpandedMSEObserver
from vexport.observers.qparams import ObserverArgs
from vexport.records import observer_names
from vexport.records.observer_names import ObserverName, OptionValue


def _class(observer: ObserverName) -> type[Observer]:
    kind: type[Observer] = getattr(import_module(f"{__name__}.{observer.file}"), observer.kind)
    return kind


OBSERVERS: Mapping[str, type[Observer]] = {
    name: _class(each) for name, each in observer_names.OBSERVERS.items()
}


def load_observer(
    name: str, base_name: str, args: ObserverArgs, keywords: Mapping[str, OptionValue] | None = None
) -> Observer:
    """The observer of that name for a tensor kind; ValueError lists the names."""
    return Observer.of_name(name)(base_name, args, **(keywords or {}))


__all__ = [
    "OBSERVERS",
    "IMatrixMSEObserver",
    "Importance",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "ObserverArgs",
    "OptionValue",
    "QParamsDict",
    "StaticMinMaxObserver",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
    "load_observer",
]
