"""The compiled searches against a plain float64 search over all candidates.

Choices may differ where two candidates are equal to rounding, so it is the error of the choice that is
compared: never above the least error by more than TOLERANCE.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from vexport.observers.kernels import (
    E4M3,
    Format,
    integer_format,
    search_nvfp4_scales,
    search_ranges,
)
from vexport.observers.kernels.arithmetic import power, power_12_5

Doubles = npt.NDArray[np.float64]

TOLERANCE = 1e-6
SHRINKS = [1 - step / 100 for step in range(20)]
IMATRIX_SHRINKS = [1 - step / 20 for step in range(20)]
INT4, INT8 = integer_format(4), integer_format(8)
INT4_ASYMMETRIC = integer_format(4, symmetric=False)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def heavy_tailed(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    outliers = torch.rand(rows, columns, generator=generator) > 0.99
    return torch.where(outliers, weight * 8, weight).to(dtype)


def rounded_float(scaled: Doubles, largest: float, smallest_exponent: int, mantissa_bits: int) -> Doubles:
    exponent = np.frexp(scaled)[1] - 1
    step = np.exp2(np.maximum(exponent, smallest_exponent) - mantissa_bits)
    return np.asarray(np.clip(np.rint(scaled / step) * step, -largest, largest))


def errors_of_range(values: Doubles, low: np.float32, high: np.float32, form: Format) -> Doubles:
    """|q - x| of every value with the float32 scale and zero point of a range."""
    low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    least, most = float(form.low), float(form.high)
    zero = 0.0
    if form.zero_points:
        scale = np.float32(np.float32(high - low) / np.float32(most - least))
        zero = float(np.clip(np.rint(np.float32(least) - low / scale), least, most))
    else:
        scale = np.float32(max(abs(low), abs(high)) / np.float32((most - least) / 2))
    step = float(scale) or 2.0**-23
    scaled = values / step + zero
    is_float = form is E4M3
    rounded = rounded_float(scaled, 448.0, -6, 3) if is_float else np.clip(np.rint(scaled), least, most)
    return np.asarray(np.abs(rounded - zero - values / step) * step)


def blocks_of(
    weight: torch.Tensor, block: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], Doubles, slice]]:
    """((row, column) in the grid of blocks, values, columns) of every block."""
    values = weight.double().numpy()
    for top in range(0, values.shape[0], block[0]):
        for left in range(0, values.shape[1], block[1]):
            columns = slice(left, min(left + block[1], values.shape[1]))
            yield (top // block[0], left // block[1]), values[top : top + block[0], columns], columns


def assert_least_error(
    weight: torch.Tensor,
    block: tuple[int, int],
    form: Format,
    *,
    shrinks: list[float] = SHRINKS,
    norm: float = 2.4,
    importance: torch.Tensor | None = None,
) -> None:
    lows, highs = search_ranges(weight, block, form, shrinks, norm=norm, importance=importance)
    weights = np.ones(weight.shape[1]) if importance is None else importance.double().numpy()
    factors = [np.float32(shrink) for shrink in shrinks]
    for place, values, columns in blocks_of(weight, block):
        low, high = np.float32(values.min()), np.float32(values.max())
        candidates = [(low * factor, high * factor) for factor in factors]
        chosen = (np.float32(lows[place]), np.float32(highs[place]))
        assert chosen in candidates

        def error(ends: tuple[np.float32, np.float32], values: Doubles, columns: slice) -> float:
            return float((weights[columns] * errors_of_range(values, *ends, form) ** norm).sum())

        least = min(error(ends, values, columns) for ends in candidates)
        assert error(chosen, values, columns) <= least * (1 + TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block", "form"),
    [
        ((1, 128), INT4),
        ((1, 32), INT4_ASYMMETRIC),
        ((1, 1536), INT8),
        ((1, 1536), E4M3),
        ((16, 24), E4M3),
        ((13, 1536), E4M3),
        ((13, 1536), INT8),
    ],
)
def test_the_error_is_the_least_of_all_candidates(
    block: tuple[int, int], form: Format, dtype: torch.dtype
) -> None:
    assert_least_error(heavy_tailed(13, 1536, dtype), block, form)


@pytest.mark.parametrize("block", [(1, 128), (1, 512), (8, 128)])
def test_importance_is_per_column(block: tuple[int, int]) -> None:
    importance = torch.rand(512, generator=torch.Generator().manual_seed(1)) ** 4
    weight = heavy_tailed(9, 512, torch.bfloat16)
    assert_least_error(weight, block, INT4, shrinks=IMATRIX_SHRINKS, norm=3.0, importance=importance)
    assert_least_error(weight, block, INT4, norm=2.0, importance=importance)


@pytest.mark.parametrize("scale", [2.0**-110, 1e-30, 1e-10, 1e10, 1e36])
@pytest.mark.parametrize("form", [INT4, INT4_ASYMMETRIC, INT8, E4M3])
def test_the_unit_of_the_weight_changes_nothing(form: Format, scale: float) -> None:
    weight = heavy_tailed(3, 256, torch.float32) * scale
    assert_least_error(weight, (1, 128), form)
    assert_least_error(weight, (3, 256), form)


def test_float16_subnormals_are_exact() -> None:
    weight = (heavy_tailed(4, 256, torch.float32) * 2.0**-14).to(torch.float16)
    assert_least_error(weight, (1, 128), INT4)


def test_the_first_of_equal_candidates_is_taken() -> None:
    for weight in (torch.zeros(4, 256), torch.zeros(4, 256, dtype=torch.bfloat16)):
        for block in ((1, 128), (2, 256), (4, 256)):
            lows, highs = search_ranges(weight, block, INT4, SHRINKS, norm=2.4)
            assert not lows.any()
            assert not highs.any()
    scales = search_nvfp4_scales(torch.zeros(2, 32), 1.0, largest=1.8, smallest=0.8, norm=2.4)
    assert (scales.float() == 0.125).all()


def test_values_that_are_not_finite_show_in_the_range() -> None:
    weight = heavy_tailed(4, 256, torch.float16)
    weight[0, 3], weight[1, 200], weight[2, 5] = torch.nan, torch.inf, -torch.inf
    for dtype in DTYPES:
        lows, highs = search_ranges(weight.to(dtype), (1, 128), INT4, SHRINKS, norm=2.4)
        finite = lows.isfinite() & highs.isfinite()
        assert finite.tolist() == [[False, True], [True, False], [False, True], [True, True]]
        ends = search_ranges(weight.to(dtype), (4, 256), INT4, SHRINKS, norm=2.4)
        assert not (ends[0].isfinite() & ends[1].isfinite()).any()


def test_a_weight_that_is_a_view_is_read_as_it_is() -> None:
    weight = heavy_tailed(256, 64, torch.bfloat16)
    for got, expected in zip(
        search_ranges(weight.T, (1, 128), INT4, SHRINKS, norm=2.4),
        search_ranges(weight.T.contiguous(), (1, 128), INT4, SHRINKS, norm=2.4),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"got torch.float64, need one of torch.float32"):
        search_ranges(torch.zeros(1, 16, dtype=torch.float64), (1, 16), INT4, SHRINKS, norm=2.4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("largest", "smallest", "norm"), [(1.0, 0.81, 2.4), (1.8, 0.8, 2.4), (1.0, 0.05, 3.0)]
)
@pytest.mark.parametrize("unit", [1.0, 1e-3, 2.0**-12])
def test_the_nvfp4_error_is_the_least_of_all_candidates(
    dtype: torch.dtype, largest: float, smallest: float, norm: float, unit: float
) -> None:
    weight = heavy_tailed(7, 256, dtype)
    # With a unit, another layer of the fusion group has the largest value: scales become subnormal.
    global_scale = float(torch.tensor(2688.0 * unit) / weight.abs().max().float())
    importance = (
        torch.rand(256, generator=torch.Generator().manual_seed(2)) if norm == 3.0 else torch.ones(256)
    )
    scales = search_nvfp4_scales(
        weight, global_scale, largest=largest, smallest=smallest, norm=norm, importance=importance
    )
    assert scales.dtype == torch.float8_e4m3fn
    assert scales.shape == (7, 16)
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for place, values, columns in blocks_of(weight, (1, 16)):
        weights = importance[columns].double().numpy()
        ends = torch.tensor([smallest, largest]) * float(np.abs(values).max()) / 6 * global_scale
        least, most = ends.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float().tolist()

        def error(number: float, values: Doubles, weights: Doubles) -> float:
            step = number / global_scale
            return float(
                (weights * np.abs(rounded_float(values / step, 6.0, 0, 1) * step - values) ** norm).sum()
            )

        candidates = [number for number in numbers.float().tolist() if least <= number <= most]
        best = min(error(number, values, weights) for number in candidates)
        chosen = float(scales[place])
        assert chosen in candidates
        assert error(chosen, values, weights) <= best * (1 + TOLERANCE)


@pytest.mark.parametrize("exponent", [2.0, 2.2, 2.4, 3.5])
def test_powers_are_right_to_float32(exponent: float) -> None:
    values = np.exp2(np.linspace(-30, 12, 20001)).astype(np.float32)
    exact = values.astype(np.float64) ** exponent
    got = np.array([power(value, np.float32(exponent)) for value in values], dtype=np.float64)
    logarithm = np.abs(exponent * np.log2(values.astype(np.float64)))
    # The exponent itself is rounded to float32 as well.
    assert (np.abs(got / exact - 1) < 3e-7 * (1 + logarithm)).all()


def test_the_power_of_the_default_norm_is_right_to_float32() -> None:
    values = np.exp2(np.linspace(-30, 12, 20001)).astype(np.float32)
    got = np.array([power_12_5(value) for value in values], dtype=np.float64)
    assert (np.abs(got / values.astype(np.float64) ** 2.4 - 1) < 6e-7).all()
    assert power_12_5(np.float32(0)) == 0
