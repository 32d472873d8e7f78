"""Smallest and largest value of each channel of an activation, exactly, in one pass over its bits.

Any minimum and maximum over groups of channels follows from these two rows, so that an observer of ranges
may see them in place of the activation. torch reduces 16-bit floats over tokens several times more slowly
than the integers that they are stored as, and over groups of 16 channels fifty times.
"""

import torch

SIGN = -(2**15)
# Sign and magnitude in 16 bits; infinite and NaN have the largest magnitudes.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def channel_extremes(value: torch.Tensor) -> torch.Tensor:
    """Minima and maxima over all tokens of an activation (..., channels): (2, channels), same dtype.

    A channel with a NaN has a NaN among them. The activation must not be empty.
    """
    flat = value.detach().reshape(-1, value.shape[-1])
    if flat.dtype not in SIXTEEN_BIT:
        return torch.stack((flat.amin(0), flat.amax(0)))
    bits = flat.contiguous().view(torch.int16)
    # As integers positive floats are in order and above all negative ones, which are in reverse order.
    highest, lowest = bits.amax(0), bits.amin(0)
    most_negative = (bits ^ SIGN).amax(0)
    low = torch.where(most_negative >= 0, most_negative ^ SIGN, lowest)
    high = torch.where(highest >= 0, highest, lowest)
    return torch.stack((low, high)).view(flat.dtype)


class Extremes:
    """The extremes of the activation last seen: layers that share an input (q, k and v) share the work.

    `not_finite` names the first layer whose input was not.
    """

    def __init__(self) -> None:
        self.not_finite: str | None = None
        self._value: torch.Tensor | None = None
        self._version = -1
        self._rows = torch.empty(0)

    def of(self, value: torch.Tensor, layer: str) -> torch.Tensor:
        """`channel_extremes` of a layer's input, from memory if the last call had that tensor, unchanged."""
        if value is not self._value or value._version != self._version:
            self._rows = channel_extremes(value)
            self._value, self._version = value, value._version
            if self.not_finite is None and not bool(torch.isfinite(self._rows).all()):
                self.not_finite = layer
        return self._rows
