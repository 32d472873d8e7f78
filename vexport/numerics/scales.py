"""Scales of a whole tensor from its largest magnitude, float32."""

import numpy as np
import numpy.typing as npt

from vexport.numerics.constants import E4M3_MAX, FLOAT32_EPS, GLOBAL_SCALE_NUMERATOR

Floats = npt.NDArray[np.float32]


def global_scale_of(largest: np.float32) -> Floats:
    """448 * 6 / largest: float32, shape (1,); 1 where that is not finite (all zero)."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # The reciprocal first, as torch divides a number by a tensor.
        scale = np.float32(GLOBAL_SCALE_NUMERATOR) * (np.float32(1.0) / np.float32(largest))
    return np.array([scale if np.isfinite(scale) else 1.0], np.float32)


def fp8_scale_of(largest: np.float32) -> Floats:
    """largest / 448: float32, shape (1,); the smallest step of float32 at one where that is zero."""
    scale = np.float32(largest) / np.float32(E4M3_MAX)
    return np.array([scale if scale else FLOAT32_EPS], np.float32)
