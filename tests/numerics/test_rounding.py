"""Number formats, equal to the bit in compiled kernels and in torch.

Their values are compared with torch's float8 dtypes and with a table of the e2m1 numbers.
"""

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from vexport.formats.packing import mxfp
from vexport.numerics import E8M0_NAN, MX_GROUP
from vexport.numerics.arithmetic import Floats, e2m1_codes, e4m3_codes, round_values
from vexport.numerics.number_formats import E2M1, E4M3, NumberFormat, integer_format
from vexport.numerics.tensors import TensorFormat, mx_scale, round_to

NUMBERS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FORMATS = {"e2m1": E2M1, "e4m3": E4M3, "int4": integer_format(4), "int8": integer_format(8)}
SCALES = (1.0, 0.75, 448.0, 2.0**-126, 2.0**-127, 2.0**-140, 2.0**-149)


def edge_values(form: NumberFormat) -> Floats:
    """Return all bfloat16 numbers, and the format's numbers and ties, with their neighbours."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    steps = np.arange(-2 * int(form.high), 2 * int(form.high), 2.0**-10, dtype=np.float32)
    near = np.concatenate([np.nextafter(steps, np.float32(np.inf)), np.nextafter(steps, -steps)])
    return np.concatenate([every, steps, near])


def bits(values: Floats) -> npt.NDArray[np.int32]:
    """Return bit patterns. All NaNs have the same pattern."""
    return np.where(np.isnan(values), np.int32(-1), values.view(np.int32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_kernels_and_torch_round_equally(name: str) -> None:
    form = FORMATS[name]
    values = edge_values(form)
    by_torch = round_to(torch.from_numpy(values), TensorFormat.of(form)).numpy()
    by_kernel = values.copy()
    round_values(by_kernel, form)
    assert np.array_equal(bits(by_kernel), bits(by_torch))
    assert np.array_equal(np.isnan(by_kernel), np.isnan(values))
    assert not np.signbit(by_kernel[by_kernel == 0]).any()
    infinite = np.array([np.inf, -np.inf], np.float32)
    round_values(infinite, form)
    assert infinite.tolist() == [form.high, form.low]


def test_e2m1_ties_are_even() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0], np.float32)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    for sign in (1, -1):
        found = round_to(torch.from_numpy(sign * ties), TensorFormat.of(E2M1))
        assert torch.equal(found, sign * expected)


@pytest.mark.parametrize("scale", SCALES)
def test_codes_match_rounded_values(scale: float) -> None:
    """Values are finite. Scales go down to the smallest subnormal number."""
    values = edge_values(E2M1)
    with np.errstate(over="ignore"):
        values = values[np.isfinite(values)] * np.float32(scale)
    values = np.ascontiguousarray(values[np.isfinite(values)])
    scales, codes = np.full_like(values, scale), np.empty(values.size, np.uint8)
    scaled = torch.from_numpy(values) / torch.from_numpy(scales)
    e2m1_codes(values, scales, codes)
    numbers = NUMBERS[codes & 7]
    rounded = round_to(scaled, TensorFormat.of(E2M1)).numpy()
    assert np.array_equal(numbers, np.abs(rounded))
    assert np.array_equal(codes >> 3, np.signbit(values))
    e4m3_codes(values, scales, codes)
    stored = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(codes, stored.view(torch.uint8).numpy())
    assert torch.equal(round_to(scaled, TensorFormat.of(E4M3)), stored.float())


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_mx_scales_are_equal(name: str) -> None:
    """Compare the scales of all bfloat16 magnitudes and their float32 neighbours, as packed."""
    form = FORMATS[name]
    every = (np.arange(1 << 15, dtype=np.int32) << 16)[:, None] + np.arange(-1, 2, dtype=np.int32)
    largest = every.clip(0, 0x7F800000).astype(np.int32).view(np.float32).reshape(-1)
    groups = np.zeros((largest.size, MX_GROUP), np.float32)
    groups[:, 5] = -largest
    codes, steps = np.empty(largest.size, np.uint8), np.empty(groups.size, np.float32)
    mxfp.find_scales(groups.reshape(-1), form, codes)
    mxfp.find_steps(codes, steps)
    scales = mx_scale(torch.from_numpy(largest), TensorFormat.of(form)).numpy()
    assert np.array_equal(bits(steps[::MX_GROUP]), bits(scales))
    assert np.array_equal(codes, mxfp.exponents(scales))
    assert np.array_equal(codes == E8M0_NAN, ~np.isfinite(largest))
    assert scales.min() == np.float32(2.0**-127)
    # compressed-tensors has no code below 0, and rounds the largest magnitudes up to infinity.
    is_small = largest < np.float32(1.75 * 2.0**127)
    theirs = generate_mx_scales(
        torch.from_numpy(largest[is_small]), num_bits=4 if name == "e2m1" else 8
    )
    assert np.array_equal(codes[is_small], theirs.clamp(min=0).to(torch.uint8).numpy())
    nan = torch.tensor([float("nan")])
    assert float(mx_scale(nan, TensorFormat.of(form))) == np.inf


def test_rounding_in_torch_loads_no_numba() -> None:
    """vLLM's CPU build fails to start if numba is imported."""
    code = "import sys, vexport.engine.cpu_emulation.rounding; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
