"""Observers: compute scale, zero point and global scale from observed tensors.

The public names are llm-compressor's, and their classes have all documented methods
(`vexport.observers.llmcompressor`). vexport itself uses the smaller classes below them. To add an
observer, add a class to this package, the same class to `llmcompressor/classes.py`, and an entry to
`vexport.records.observer_names`.
"""

from collections.abc import Mapping

from vexport.observers.base import QParamsDict, RangeObserver
from vexport.observers.flatten import flatten_for_calibration, get_observer_token_count
from vexport.observers.imatrix import Importance
from vexport.observers.llmcompressor.classes import (
    OBSERVERS,
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    NVFP4ExpandedIMatrixObserver,
    NVFP4ExpandedMSEObserver,
    StaticMinMaxObserver,
)
from vexport.observers.llmcompressor.fusion import fuse_weight_observers
from vexport.observers.llmcompressor.observer import Observer
from vexport.observers.minmax import lerp
from vexport.observers.mse import fit_global_scale
from vexport.observers.qparams import ObserverArgs
from vexport.records.observer_names import OptionValue, observer_name

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
    "RangeObserver",
    "StaticMinMaxObserver",
    "fit_global_scale",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
    "lerp",
    "load_observer",
]
# The classes that vexport itself uses: the last base of each public class.
PLAIN: Mapping[str, type[RangeObserver]] = {
    name: kind.__bases__[-1] for name, kind in OBSERVERS.items()
}


def load_observer(
    name: str, base_name: str, args: ObserverArgs, keywords: Mapping[str, OptionValue] | None = None
) -> RangeObserver:
    """Return a new observer by name, or by package.module:Class.

    Raises ValueError, with a list of the known names, if the name is unknown.
    """
    kind = PLAIN.get(observer_name(name))
    if kind is not None:
        return kind(base_name, args, **(keywords or {}))
    return Observer.get_value_from_registry(name).create(base_name, args, keywords or {})
