"""How far one tensor is from another, a part at a time, so that float64 copies stay small."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

# A tensor that came back exactly has no noise; a report needs a finite number.
EXACT_DB = 200.0
# Elements of two tensors that are compared at once.
COMPARED = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Over all elements: how many differ, the power of the first, that of the difference."""

    changed: int
    signal: float
    noise: float

    def __add__(self, other: "Noise") -> "Noise":
        """That of both parts together."""
        return Noise(
            changed=self.changed + other.changed,
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
        )

    @property
    def decibels(self) -> float:
        """Signal-to-noise ratio; EXACT_DB without noise, -EXACT_DB without signal."""
        if self.noise == 0 or self.signal == 0:
            return EXACT_DB if self.noise == 0 else -EXACT_DB
        return round(10 * math.log10(self.signal / self.noise), 3)

    @property
    def relative(self) -> float:
        """|second - first| / |first| in Frobenius norms."""
        return math.sqrt(self.noise / self.signal) if self.signal else math.sqrt(self.noise)


NONE = Noise(changed=0, signal=0.0, noise=0.0)


def array_noise(exact: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> Noise:
    """The noise of an array against another of its shape, all at once."""
    old, new = exact.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return Noise(
            changed=int((old != new).sum()),
            signal=float(np.square(old).sum()),
            noise=float(np.square(new - old).sum()),
        )


def noise_of(exact: "torch.Tensor", other: "torch.Tensor") -> Noise:
    """The noise of a tensor against another of its shape."""
    found = NONE
    left, right = exact.reshape(-1), other.reshape(-1)
    for start in range(0, left.numel(), COMPARED):
        part = slice(start, start + COMPARED)
        old, new = left[part].double(), right[part].double()
        found += Noise(
            changed=int((old != new).sum()),
            signal=float(old.square().sum()),
            noise=float((new - old).square().sum()),
        )
    return found
