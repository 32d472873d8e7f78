"""The observers by name, without torch; `vexport.observers` loads the classes.

Adding an observer is one new file in `vexport/observers` and one entry here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vexport.types.observer_options import (
    IMPORTANCE_SEARCH,
    NVFP4_EXPANDED_IMPORTANCE,
    NVFP4_EXPANDED_SEARCH,
    SEARCH,
    AverageOptions,
    AverageSearchOptions,
    Options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverName:
    """The file and class of an observer, the first sentence of that class's docstring, its keywords."""

    file: str
    kind: str
    summary: str
    options: Options = Options()
    aliases: tuple[str, ...] = ()


OBSERVERS: Mapping[str, ObserverName] = {
    "memoryless_minmax": ObserverName(
        file="minmax",
        kind="MemorylessMinMaxObserver",
        summary="The range of the last tensor observed",
    ),
    "static_minmax": ObserverName(
        file="minmax",
        kind="StaticMinMaxObserver",
        summary="The running minimum and maximum over all tensors observed",
    ),
    "minmax": ObserverName(
        file="minmax",
        kind="MinMaxObserver",
        summary="A moving average of minimum and maximum, `old * (1 - c) + new * c`",
        options=AverageOptions(),
    ),
    "memoryless_mse": ObserverName(
        file="mse",
        kind="MemorylessMSEObserver",
        summary="The range of the last tensor that has the least quantization error",
        options=SEARCH,
    ),
    "mse": ObserverName(
        file="mse",
        kind="MovingAverageMSEObserver",
        summary="A moving average of the ranges with the least quantization error",
        options=AverageSearchOptions(),
    ),
    "imatrix_mse": ObserverName(
        file="imatrix",
        kind="IMatrixMSEObserver",
        summary="Least quantization error weighted by the mean square of each input channel",
        options=IMPORTANCE_SEARCH,
    ),
    "nvfp4_expanded_mse": ObserverName(
        file="mse",
        kind="NVFP4ExpandedMSEObserver",
        summary="Least quantization error between 1.8 and 0.8 times the range, for NVFP4",
        options=NVFP4_EXPANDED_SEARCH,
        aliases=("fouroversix",),
    ),
    "nvfp4_expanded_imatrix": ObserverName(
        file="imatrix",
        kind="NVFP4ExpandedIMatrixObserver",
        summary="The same search between 1.5 and 0.5 times the range, for NVFP4",
        options=NVFP4_EXPANDED_IMPORTANCE,
    ),
}
# A weight is observed once, so these all give the range of its values.
MIN_MAX = ("memoryless_minmax", "static_minmax", "minmax")
# Searches by what calibration gathers, and the one of them that weights are rounded with in NVFP4.
BY_IMPORTANCE = (IMPORTANCE := "imatrix_mse", EXPANDED := "nvfp4_expanded_imatrix")
# The same search for weights of whose inputs nothing is known.
UNWEIGHTED = "memoryless_mse"
# Between the module and the class of an observer of another package: `package.module:Class`.
CLASS_SEPARATOR = ":"


def folded(name: str) -> str:
    """A name as it is looked up: in any case, `-` and spaces as `_`; as compressed-tensors' registry."""
    return name.lower().replace("-", "_").replace(" ", "_")


def observer_name(name: str) -> str:
    """The registry name that `name` or an alias spells; the text itself where it is none of vexport's."""
    spelled = {alias: known for known, each in OBSERVERS.items() for alias in (known, *each.aliases)}
    return spelled.get(folded(name), name)
