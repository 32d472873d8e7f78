"""Searches of `vexport.observers.search` in torch, for weights that are not on the CPU.

They try the same candidates with the same float32 arithmetic as the compiled kernels. There are two
differences: sums have another order, and the kernels round a multiply-add only once. The host waits
for the device only to read the results of a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vexport.numerics import E4M3_EPS, FLOAT32_EPS
from vexport.numerics.number_formats import (
    BFLOAT16,
    E8M0,
    EXPONENT_MASK,
    FLOAT16,
    NumberFormat,
)
from vexport.numerics.tensors import E2M1, E4M3, TensorFormat, mx_scale, round_to

# Groups are multiplied by a power of two, so that their largest value is about UNIT and their
# scales are about 1. Powers of errors then neither overflow nor underflow.
UNIT = 64.0
LEAST_MAGNITUDE, LARGEST_MAGNITUDE = 2.0**-120, 2.0**120
SCALE_DTYPES = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
# Number of e4m3 codes from 0 to the largest finite number. Larger codes are larger numbers.
E4M3_CODES = 127


class GroupChoices(NamedTuple):
    """Result of the search for each group.

    `low` and `high` (float32) are the expanded range before shrinking, and `step` is the index of
    the best shrink. `improved` has a flag per step: True if the step improved any group.
    """

    low: torch.Tensor
    high: torch.Tensor
    step: torch.Tensor
    improved: list[bool]


def search_grid_groups(
    groups: torch.Tensor,
    form: NumberFormat,
    shrinks: Sequence[float],
    *,
    norm: float,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
) -> GroupChoices:
    """Return the best shrink of every row of `groups` (count, size).

    See `search.search_grid_groups` for the arguments and the result.
    """
    values = groups.to(torch.float32)
    low, high = torch.aminmax(values, dim=1)
    low = low * expand
    high = high * expand
    largest = torch.maximum(-low, high).clamp(LEAST_MAGNITUDE, LARGEST_MAGNITUDE)
    unit = UNIT / power_of_two_below(largest)
    values = values * unit.unsqueeze(1)
    weights = None if importance is None else _rows_of(importance, groups.shape)
    least = torch.full_like(low, torch.inf)
    step = torch.zeros_like(low, dtype=torch.int64)
    improved: list[torch.Tensor] = []
    for number, shrink in enumerate(shrinks):
        scale, zero = _scale_and_zero(low * unit * shrink, high * unit * shrink, form, unit)
        scaled = values * (1.0 / scale).unsqueeze(1)
        if zero is not None:
            scaled = scaled + zero.unsqueeze(1)
        rounded = round_to(scaled, TensorFormat.of(form))
        if zero is not None:
            rounded = rounded - zero.unsqueeze(1)
        error = _error(values - rounded * scale.unsqueeze(1), norm, weights)
        is_better = error < least
        step = torch.where(is_better, number, step)
        least = torch.where(is_better, error, least)
        improved.append(is_better.any())
    return GroupChoices(low, high, step, torch.stack(improved).tolist())


def block_scales(
    groups: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    largest: float,
    smallest: float,
    norm: float,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the best NVFP4 block scales of `groups` (rows, groups, size).

    `largest` and `smallest` limit the candidates, as factors of a group's largest magnitude.
    `importance` weights the errors. It has an element for each column, in any shape.
    """
    numbers = _e4m3_numbers(groups.device)
    unit = power_of_two_below(global_scale)
    near_one = global_scale / unit
    values = groups.to(torch.float32).abs() * unit
    absmax = values.amax(-1)
    weights = None if importance is None else importance.to(torch.float32).view(groups.shape[1:])
    first = _code_of(absmax, largest, near_one, numbers)
    last = _code_of(absmax, smallest, near_one, numbers)
    best = first
    least = torch.full_like(absmax, torch.inf)
    for offset in range(int((first - last).amax()) + 1):
        code = first - offset
        number = numbers[code.clamp(min=1)]
        scale = number / near_one
        inverse = near_one / number
        rounded = round_to(values * inverse.unsqueeze(-1), E2M1)
        error = _error(values - rounded * scale.unsqueeze(-1), norm, weights)
        is_better = (error < least) & (code >= last)
        best = torch.where(is_better, code, best)
        least = torch.where(is_better, error, least)
    return torch.where(absmax == 0, E4M3_EPS, numbers[best])


def power_of_two_below(values: torch.Tensor) -> torch.Tensor:
    """Round positive normal float32 values down to powers of two."""
    return (values.view(torch.int32) & EXPONENT_MASK).view(torch.float32)


def _scale_and_zero(
    low: torch.Tensor, high: torch.Tensor, form: NumberFormat, unit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and zero points of ranges, for values multiplied by `unit`.

    Scales are rounded to their storage dtype before they are multiplied by the unit. Symmetric
    formats have no zero points (None).
    """
    low = low.clamp(max=0.0)
    high = high.clamp(min=0.0)
    span = float(form.high) - float(form.low)
    magnitude = torch.maximum(-low, high)
    if form.scale_storage == E8M0:
        scale = mx_scale(magnitude / unit, TensorFormat.of(form)) * unit
    else:
        scale = (high - low) / span if form.zero_points else magnitude / (span / 2)
        stored = (scale / unit).to(SCALE_DTYPES.get(form.scale_storage, torch.float32))
        scale = stored.to(torch.float32) * unit
        scale = torch.where(scale == 0, FLOAT32_EPS * unit, scale)
    if not form.zero_points:
        return scale, None
    zero = (float(form.low) - low / scale).round()
    return scale, zero.clamp(float(form.low), float(form.high))


def _error(differences: torch.Tensor, norm: float, weights: torch.Tensor | None) -> torch.Tensor:
    """Return sum(weights * |difference|**norm) over the last dimension."""
    error = differences.abs_().pow_(norm)
    if weights is not None:
        error.mul_(weights)
    return error.sum(-1)


def _rows_of(importance: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the importance (count, size) of each group. The rows of `importance` are repeated."""
    count, size = shape
    rows = importance.to(torch.float32).reshape(-1, size)
    return rows[torch.arange(count, device=rows.device) % len(rows)]


def _e4m3_numbers(device: torch.device) -> torch.Tensor:
    """Return the nonnegative finite e4m3 numbers as float32, ordered by code.

    They are converted on the CPU, because not every device supports torch.float8_e4m3fn.
    """
    codes = torch.arange(E4M3_CODES, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(device)


def _code_of(
    absmax: torch.Tensor, expand: float, global_scale: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Return the codes of the block scales for ranges up to `absmax * expand`.

    A code is at least the smallest positive code.
    """
    scale = round_to(absmax * global_scale / E2M1.high * expand, E4M3)
    return torch.searchsorted(numbers, scale).clamp(1, E4M3_CODES - 1)
