"""The protocol of a packing, its inputs, and what packings share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vexport.errors import InputError
from vexport.numerics.arithmetic import Bits, Floats
from vexport.numerics.number_formats import BFLOAT16, FLOAT16, FLOAT32
from vexport.records import LinearPlan

Array = npt.NDArray[np.generic]

STORAGES: Mapping[str, int] = {"BF16": BFLOAT16, "F16": FLOAT16, "F32": FLOAT32, "F64": FLOAT32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales and zero points of a weight from a search: float32, any shape with a value a group."""

    scale: Floats
    zero_point: Floats
    global_scale: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeight:
    """A weight whose values (out, in), float32, are numbers that its format stores with these
    scales.
    """

    values: Floats
    scales: Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingInputs:
    """A weight's scales or range, known before its rows are packed.

    `largest` is the largest magnitude in its fusion group, for schemes that share a scale; without
    `scales` those of the rows' ranges are made while they are packed.
    """

    largest: np.float32 | None = None
    scales: Scales | None = None


class Packing(Protocol):
    """The packing of one weight, a run of rows at a time, in any order and from several threads."""

    # Runs begin at multiples of this many rows.
    multiple: int

    def pack(self, rows: Bits, first: int) -> Array:
        """The stored bytes of some contiguous rows, of which `first` is the first.

        Raises InputError where a weight is not finite.
        """
        ...

    def tensor(self, name: str) -> Array:
        """One of the other tensors by its name within the layer, once all rows are packed."""
        ...


def storage_of(rows: Bits, dtype: str) -> int:
    """The storage as which kernels read rows of a weight stored in `dtype`: rounded ones are
    float32.
    """
    return FLOAT32 if rows.dtype == np.int32 else STORAGES[dtype]


def kernel_input(view: Array) -> Bits:
    """Contiguous bits of some rows, read-only and aligned: the one form that kernels are compiled
    for.
    """
    values = view.astype(np.float32) if view.dtype == np.float64 else view
    rows = np.require(values, requirements=["C", "A"])
    bits: Bits = rows.view(np.int32) if rows.dtype == np.float32 else rows.view(np.uint16)
    bits.flags.writeable = False
    return bits


def require_finite(member: LinearPlan, scales: Array) -> None:
    """InputError naming the weight unless all scales of some of its rows are finite numbers."""
    if not np.isfinite(scales).all():
        raise not_finite(member)


def not_finite(member: LinearPlan) -> InputError:
    """The error for a weight that holds NaN or infinity."""
    return InputError(
        member.weight,
        got="NaN or infinite values",
        need="finite weights",
        fix="restore the source checkpoint",
    )
