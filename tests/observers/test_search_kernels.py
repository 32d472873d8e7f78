"""The compiled searches, compared with a plain float64 search over all candidates.

Choices may differ between candidates that are equal up to rounding. Therefore the errors of the
choices are compared: they exceed the least error by at most TOLERANCE.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from vexport.numerics.arithmetic import power, power_6_5
from vexport.numerics.number_formats import (
    BFLOAT16,
    E2M1,
    E4M3,
    E8M0,
    FLOAT16,
    NumberFormat,
    integer_format,
)
from vexport.numerics.tensors import mx_scale
from vexport.observers.qparams import MX_FORMATS
from vexport.observers.search import (
    CANDIDATE_SLACK,
    Search,
    block_scales,
    range_of_values,
    ranges_of_groups,
    search_grid_groups,
)

Doubles = npt.NDArray[np.float64]

TOLERANCE = 1e-6
SHRINKS = [1 - step / 100 for step in range(20)]
IMATRIX_SHRINKS = [1 - step / 20 for step in range(20)]
INT4, INT8 = integer_format(4), integer_format(8)
INT4_ASYMMETRIC = INT4._replace(zero_points=True)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def heavy_tailed(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    outliers = torch.rand(rows, columns, generator=generator) > 0.99
    return torch.where(outliers, weight * 8, weight).to(dtype)


def rounded_float(
    scaled: Doubles, largest: float, smallest_exponent: int, mantissa_bits: int
) -> Doubles:
    exponent = np.frexp(scaled)[1] - 1
    step = np.exp2(np.maximum(exponent, smallest_exponent) - mantissa_bits)
    return np.asarray(np.clip(np.rint(scaled / step) * step, -largest, largest))


FLOATS: Mapping[NumberFormat, Callable[[Doubles], Doubles]] = {
    E4M3: lambda scaled: rounded_float(scaled, 448.0, -6, 3),
    E2M1: lambda scaled: rounded_float(scaled, 6.0, 0, 1),
}


def as_stored(scale: np.float32, form: NumberFormat) -> np.float32:
    """Return the scale after a round trip through its dtype."""
    dtypes = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
    stored = torch.tensor(float(scale), dtype=dtypes.get(form.scale_storage, torch.float32))
    return np.float32(stored.float().item())


def errors_of_range(
    values: Doubles, low: np.float32, high: np.float32, form: NumberFormat
) -> Doubles:
    """Return |q - x| of each value, using the float32 scale and zero point of a range."""
    low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    least, most = float(form.low), float(form.high)
    zero = 0.0
    if form.zero_points:
        scale = as_stored(np.float32(np.float32(high - low) / np.float32(most - least)), form)
        zero = float(np.clip(np.rint(np.float32(least) - low / scale), least, most))
    else:
        scale = as_stored(
            np.float32(max(abs(low), abs(high)) / np.float32((most - least) / 2)), form
        )
    step = float(scale) or 2.0**-23
    scaled = values / step + zero
    rounded = FLOATS[form](scaled) if form in FLOATS else np.clip(np.rint(scaled), least, most)
    return np.asarray(np.abs(rounded - scaled) * step)


def assert_least_error(
    groups: torch.Tensor,
    form: NumberFormat,
    *,
    shrinks: list[float] = SHRINKS,
    norm: float = 2.4,
    expand: float = 1.0,
    importance: torch.Tensor | None = None,
) -> None:
    found = search_grid_groups(
        groups, form, shrinks, norm=norm, expand=expand, importance=importance
    )
    lows, highs = (end.numpy() for end in ranges_of_groups(groups))
    factors = np.asarray(shrinks, dtype=np.float32)
    for group, values in enumerate(groups.double().numpy()):
        low, high = (np.float32(end) * np.float32(expand) for end in (values.min(), values.max()))
        if expand == 1.0:
            assert (lows[group], highs[group]) == (low, high)
        assert (float(found.low[group]), float(found.high[group])) == (float(low), float(high))
        distances = [
            errors_of_range(values, low * factor, high * factor, form) for factor in factors
        ]
        weights = (
            1.0 if importance is None else importance[group % importance.shape[0]].double().numpy()
        )
        errors = [float((weights * distance**norm).sum()) for distance in distances]
        assert errors[found.step[group]] <= min(errors) * (1 + TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "form"),
    [
        (128, INT4),
        (32, INT4_ASYMMETRIC),
        (16, E2M1),
        (1536, INT8),
        (1536, E4M3),
        (3 * 1536, E4M3),
        (7, INT8),
    ],
)
def test_choice_has_least_error(size: int, form: NumberFormat, dtype: torch.dtype) -> None:
    weight = heavy_tailed(6 if size > 1536 else 7, min(1536, 24 * size), dtype)
    assert_least_error(weight.reshape(-1, size), form)
    assert_least_error(weight.reshape(1, -1), form)


def test_choice_for_unusual_weights() -> None:
    """Weights are expanded, subnormal or transposed, or have another dtype."""
    assert_least_error(heavy_tailed(64, 128, torch.bfloat16), INT4, expand=1.8)
    assert_least_error((heavy_tailed(8, 128, torch.float32) * 2.0**-14).to(torch.float16), INT4)
    weight = heavy_tailed(128, 64, torch.bfloat16)
    assert_least_error(weight.T, INT4)
    groups = heavy_tailed(8, 128, torch.float32)
    found, other = (
        search_grid_groups(each, INT4, SHRINKS, norm=2.4) for each in (groups, groups.double())
    )
    assert torch.equal(found.step, other.step)


@pytest.mark.parametrize("storage", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("form", [INT4, INT4_ASYMMETRIC, INT8])
def test_choice_follows_stored_scale(form: NumberFormat, storage: int) -> None:
    """Scales are rounded to their dtype. Scales of the smaller weight are subnormal in float16."""
    for unit in (1.0, 2.0**-9):
        weight = heavy_tailed(24, 128, torch.float32) * unit
        assert_least_error(weight, form._replace(scale_storage=storage))


@pytest.mark.parametrize(("form", "bits"), [(E2M1, 4), (E4M3, 8)])
def test_scales_of_mx_are_powers_of_two(form: NumberFormat, bits: int) -> None:
    """The choice has the least error, using compressed-tensors' scale for each range."""
    groups, powers = heavy_tailed(64, 32, torch.bfloat16), form._replace(scale_storage=E8M0)
    found = search_grid_groups(groups, powers, IMATRIX_SHRINKS, norm=2.4)
    for group, values in enumerate(groups.double().numpy()):
        errors = []
        for factor in IMATRIX_SHRINKS:
            scale = float(mx_scale(groups[group].float().abs().max() * factor, MX_FORMATS[bits]))
            errors.append((np.abs(FLOATS[form](values / scale) * scale - values) ** 2.4).sum())
        assert errors[found.step[group]] <= min(errors) * (1 + TOLERANCE)


@pytest.mark.parametrize("period", [1, 3, 12])
def test_importance_differs_by_group(period: int) -> None:
    importance = torch.rand(period, 128, generator=torch.Generator().manual_seed(1)) ** 4
    groups = heavy_tailed(36, 128, torch.bfloat16)
    assert_least_error(groups, INT4, shrinks=IMATRIX_SHRINKS, norm=3.0, importance=importance)
    assert_least_error(groups, INT4, norm=2.0, importance=importance)


@pytest.mark.parametrize("scale", [2.0**-110, 1e-10, 1e36])
@pytest.mark.parametrize("form", [INT4, INT4_ASYMMETRIC, INT8, E4M3])
def test_choice_is_independent_of_magnitude(form: NumberFormat, scale: float) -> None:
    weight = heavy_tailed(6, 128, torch.float32) * scale
    assert_least_error(weight, form)
    assert_least_error(weight.reshape(1, -1), form)


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_of_equal_candidates_is_chosen(dtype: torch.dtype) -> None:
    found = search_grid_groups(torch.zeros(4, 128, dtype=dtype), INT4, SHRINKS, norm=2.4)
    assert not found.step.any()
    assert found.improved == [True] + [False] * 19
    zeros = torch.zeros(2, 2, 16, dtype=dtype)
    scales = block_scales(
        zeros, torch.ones(1), Search(factors=(1.0,), expand=1.8, norm=2.4, patience=0)
    )
    assert (scales == 0.125).all()


def test_patience_counts_improvements_of_groups() -> None:
    groups = heavy_tailed(5, 128, torch.float32)
    flags = [
        search_grid_groups(group.unsqueeze(0), INT4, SHRINKS, norm=2.4).improved for group in groups
    ]
    together = search_grid_groups(groups, INT4, SHRINKS, norm=2.4).improved
    assert together == [any(column) for column in zip(*flags, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_give_non_finite_range(dtype: torch.dtype) -> None:
    groups = heavy_tailed(8, 128, dtype)
    assert range_of_values(groups) == (float(groups.min()), float(groups.max()))
    groups[1, 3], groups[4, 100], groups[6, 5] = torch.nan, torch.inf, -torch.inf
    found = search_grid_groups(groups, INT4, SHRINKS, norm=2.4)
    finite = (found.low.isfinite() & found.high.isfinite()).tolist()
    assert [group for group, ok in enumerate(finite) if not ok] == [1, 4, 6]
    assert not all(np.isfinite(range_of_values(groups)))


@pytest.mark.parametrize(("dtype", "unit"), list(zip(DTYPES, (1.0, 1e-3, 2.0**-12), strict=True)))
@pytest.mark.parametrize(
    ("largest", "smallest", "norm"), [(1.0, 0.81, 2.4), (1.8, 0.8, 2.4), (1.0, 0.05, 3.0)]
)
def test_nvfp4_choice_has_least_error(
    dtype: torch.dtype, largest: float, smallest: float, norm: float, unit: float
) -> None:
    weight = heavy_tailed(7, 256, dtype)
    # `unit` stands for a fused layer with larger values, which makes scales subnormal.
    global_scale = torch.tensor(2688.0 * unit) / weight.abs().max().float()
    importance = (
        torch.rand(256, generator=torch.Generator().manual_seed(2))
        if norm == 3.0
        else torch.ones(256)
    )
    search = Search(factors=(1.0, smallest / largest), expand=largest, norm=norm, patience=0)
    scales = block_scales(weight.view(7, 16, 16), global_scale, search, importance)
    assert scales.shape == (7, 16)
    bounds = torch.tensor([smallest * (1 - CANDIDATE_SLACK), largest * (1 + CANDIDATE_SLACK)])
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    groups = weight.double().numpy().reshape(-1, 16)
    for group, values in enumerate(groups):
        weights = importance.reshape(-1, 16)[group % 16].double().numpy()
        ends = bounds * float(np.abs(values).max()) / 6 * global_scale
        least, most = ends.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float().tolist()

        def error(number: float, values: Doubles, weights: Doubles) -> float:
            step = number / float(global_scale)
            return float(
                (
                    weights
                    * np.abs(rounded_float(values / step, 6.0, 0, 1) * step - values) ** norm
                ).sum()
            )

        candidates = [number for number in numbers.float().tolist() if least <= number <= most]
        best = min(error(number, values, weights) for number in candidates)
        chosen = float(scales.flatten()[group])
        assert chosen in candidates
        assert error(chosen, values, weights) <= best * (1 + TOLERANCE)


def test_powers_are_precise() -> None:
    values = np.exp2(np.linspace(-30, 12, 20001)).astype(np.float32)
    doubles = values.astype(np.float64)
    for exponent in (2.0, 2.2, 2.4, 3.5):
        got = np.array([power(value, np.float32(exponent)) for value in values], dtype=np.float64)
        # The exponent is rounded to float32 too.
        tolerance = 3e-7 * (1 + np.abs(exponent * np.log2(doubles)))
        assert (np.abs(got / doubles**exponent - 1) < tolerance).all()
    squares = values * values
    got = np.array([power_6_5(square) for square in squares], dtype=np.float64)
    assert (np.abs(got / squares.astype(np.float64) ** 1.2 - 1) < 6e-7).all()
    assert power_6_5(np.float32(0)) == 0
