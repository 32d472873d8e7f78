"""Smallest and largest value of each channel of an activation, exactly, in one pass over its bits.

Any minimum and maximum over groups of channels follows from these two rows, so that an observer of ranges
may see them in place of the activation. torch reduces 16-bit floats over tokens several times more slowly
than the integers that they are stored as, and over groups of 16 channels fifty times.
"""

from collections import deque

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
    """The extremes of the activations last seen: layers that share an input (q, k and v) share the work.

    Two are remembered: of experts, what enters all comes in turn with what each makes of it. `not_finite`
    names the first layer whose input was not.
    """

    def __init__(self) -> None:
        self.not_finite: str | None = None
        self._last: deque[tuple[torch.Tensor, int, torch.Tensor]] = deque(maxlen=2)

    def of(self, value: torch.Tensor, layer: str) -> torch.Tensor:
        """`channel_extremes` of a layer's input, from memory if it was seen just before, unchanged."""
        for place, (seen, version, rows) in enumerate(self._last):
            if value is seen and value._version == version:
                self._last.rotate(-1 - place)  # to the end, as the last one seen
                return rows
        rows = channel_extremes(value)
        self._last.append((value, value._version, rows))
        if self.not_finite is None and not bool(torch.isfinite(rows).all()):
            self.not_finite = layer
        return rows
