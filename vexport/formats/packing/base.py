"""Protocol of a packing, its inputs, and shared helpers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vexport.errors import InputError
from vexport.numerics.arithmetic import Bits, Floats
from vexport.numerics.number_formats import BFLOAT16, FLOAT16, FLOAT32
from vexport.records import LinearPlan
from vexport.rules.quantize import NOT_FINITE

Array = npt.NDArray[np.generic]

# Storage codes by the dtype of the source. `kernel_input` converts float64 to float32.
STORAGES: Mapping[str, int] = {"BF16": BFLOAT16, "F16": FLOAT16, "F32": FLOAT32, "F64": FLOAT32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales and zero points from a search: float32, in any shape, with a value for each group."""

    scale: Floats
    zero_point: Floats
    global_scale: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeight:
    """Weight with values that its format can store exactly with these scales.

    `values` are float32 (out, in).
    """

    values: Floats
    scales: Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingInputs:
    """Scales or range of a weight, computed before its rows are packed.

    `largest` is the largest magnitude in the weight's fusion group, for schemes that share a scale.
    The shared scale is computed from it. All other scales that are not in `scales` are computed
    from the rows' ranges during packing.
    """

    largest: np.float32 | None = None
    scales: Scales | None = None


class Packing(Protocol):
    """Packing of a weight. Runs of rows are packed in any order and from several threads."""

    # Runs start at multiples of this number of rows.
    multiple: int

    def pack(self, rows: Bits, first: int) -> Array:
        """Return the stored bytes of contiguous rows that start at row `first`.

        Raises InputError if a weight is not finite.
        """
        ...

    def tensor(self, name: str) -> Array:
        """Return another tensor by its name within the layer, after all rows are packed."""
        ...


def storage_of(rows: Bits, dtype: str) -> int:
    """Return the storage code of rows for the kernels.

    `dtype` is the weight's dtype in the source. Rows that were rounded before packing are float32,
    whatever the dtype.
    """
    return FLOAT32 if rows.dtype == np.int32 else STORAGES[dtype]


def kernel_input(view: Array) -> Bits:
    """Return some rows as contiguous, read-only, aligned bits, as the kernels require."""
    values = view.astype(np.float32) if view.dtype == np.float64 else view
    rows = np.require(values, requirements=["C", "A"])
    bits: Bits = rows.view(np.int32) if rows.dtype == np.float32 else rows.view(np.uint16)
    bits.flags.writeable = False
    return bits


def require_finite(member: LinearPlan, scales: Array) -> None:
    """Raise InputError if a scale is not finite. The error names the weight of `member`."""
    if not np.isfinite(scales).all():
        raise not_finite(member.weight)


def not_finite(weight: str) -> InputError:
    """Return the error for a weight that contains NaN or infinity. `weight` is its stored name."""
    return InputError.of(NOT_FINITE, weight)
