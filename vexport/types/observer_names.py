"""The observers by name, without torch; `vexport.observers` has the classes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverName:
    """The class of an observer, and the first sentence of that class's docstring."""

    kind: str
    summary: str


OBSERVERS: Mapping[str, ObserverName] = {
    "memoryless_minmax": ObserverName(
        kind="MemorylessMinMaxObserver",
        summary="The range of the last tensor observed",
    ),
    "static_minmax": ObserverName(
        kind="StaticMinMaxObserver",
        summary="The running minimum and maximum over all tensors observed",
    ),
    "minmax": ObserverName(
        kind="MinMaxObserver",
        summary="A moving average of minimum and maximum, `old * (1 - c) + new * c`",
    ),
    "memoryless_mse": ObserverName(
        kind="MemorylessMSEObserver",
        summary="The range of the last tensor that has the least quantization error",
    ),
    "mse": ObserverName(
        kind="MovingAverageMSEObserver",
        summary="A moving average of the ranges with the least quantization error",
    ),
    "imatrix_mse": ObserverName(
        kind="IMatrixMSEObserver",
        summary="Least quantization error weighted by the mean square of each input channel",
    ),
    "nvfp4_expanded_mse": ObserverName(
        kind="NVFP4ExpandedMSEObserver",
        summary="Least quantization error between 1.8 and 0.8 times the range, for NVFP4",
    ),
}
# A weight is observed once, so these all give the range of its values.
MIN_MAX = ("memoryless_minmax", "static_minmax", "minmax")
# Searches by what calibration gathers.
IMPORTANCE = "imatrix_mse"
