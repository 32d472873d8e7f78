"""Scales of a whole tensor from its largest magnitude, float32."""

import numpy as np

from vexport.numerics.arithmetic import E2M1, E4M3, F32, Floats
from vexport.numerics.constants import FLOAT32_EPS


def global_scale_of(largest: np.float32) -> Floats:
    """448 * 6 / largest: float32, shape (1,); 1 where that is not finite (all zero)."""
    with np.errstate(divide="ignore", over="ignore"):
        # The reciprocal first, as torch divides a number by a tensor.
        scale = F32(E4M3.high * E2M1.high) * (F32(1.0) / F32(largest))
    return np.array([scale if np.isfinite(scale) else 1.0], np.float32)


def fp8_scale_of(largest: np.float32) -> Floats:
    """largest / 448: float32, shape (1,); the smallest step of float32 at one where that is zero."""
    scale = F32(largest) / E4M3.high
    return np.array([scale if scale else FLOAT32_EPS], np.float32)
