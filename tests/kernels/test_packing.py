"""What the kernels pack is to the bit what observers and compressors in torch give."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.compress import COMPRESSORS
from vexport.errors import InputError
from vexport.kernels.arithmetic import E2M1, E4M3, F32
from vexport.kernels.codes import e2m1_code, e4m3_code, e4m3_value, largest_magnitude, pack_bits
from vexport.observers import load_observer
from vexport.packing import PACKINGS, Known, Scales
from vexport.packing.base import STORAGES, kernel_input, shares_scale
from vexport.quantize import runs
from vexport.schemes import all_schemes, get_scheme
from vexport.schemes.base import Scheme
from vexport.searched import scales_of
from vexport.types import LinearPlan

SCHEMES = [scheme.name for scheme in all_schemes()]
DTYPES = ("BF16", "F16", "F32")


def heavy_tailed(rows: int, columns: int, dtype: str) -> torch.Tensor:
    """Normal values with outliers, rows and groups of zeros, tiny rows down to subnormals."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight = torch.where(torch.rand(weight.shape, generator=generator) > 0.99, weight * 30, weight)
    weight[1] = 0
    weight[2, : columns // 2] = -0.0
    weight[3] *= 1e-4 if dtype == "F16" else 1e-37
    weight[4, :64] *= 1e-6
    return weight.to(TORCH_DTYPES[dtype])


def bits_of(weight: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The weight as a reader gives it."""
    if weight.dtype == torch.float32:
        return weight.numpy()
    return weight.view(torch.uint16).numpy()


def packed(scheme: Scheme, weight: torch.Tensor, dtype: str, scales: Scales | None) -> dict[str, bytes]:
    """Every stored tensor's bytes, the rows packed in several runs and in reverse order."""
    rows, columns = weight.shape
    member = LinearPlan(name="layer", weight="layer.weight", out_features=rows, in_features=columns)
    args, view = scheme.args.weights, bits_of(weight)
    known = Known(scales=scales)
    if scales is None and shares_scale(args):
        known = Known(largest=np.float32(largest_magnitude(kernel_input(view).reshape(-1), STORAGES[dtype])))
    packing = PACKINGS[scheme.family.format](member, dtype, args, known)
    step = packing.multiple * max(1, rows // packing.multiple // 3)
    parts = {
        start: packing.pack(kernel_input(view[start : start + step]), start)
        for start in reversed(range(0, rows, step))
    }
    first, *others = (spec.name.removeprefix("layer.") for spec in scheme.layout(member, dtype))
    stored = {first: b"".join(parts[start].tobytes() for start in sorted(parts))}
    stored |= {name: packing.tensor(name).tobytes() for name in others if not name.startswith("input")}
    return stored


def reference(scheme: Scheme, weight: torch.Tensor, observer_name: str) -> tuple[dict[str, bytes], Scales]:
    """The same from torch, and the scales that its observer found."""
    observer = load_observer(observer_name, "weight", scheme.args.weights)
    observer.forward(weight)
    tensors = COMPRESSORS[scheme.family.format](weight, observer.get_qparams(), scheme.args)
    return {name: raw(tensor) for name, tensor in tensors.items()}, scales_of(observer)


def raw(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def shapes_for(scheme: Scheme) -> list[tuple[int, int]]:
    """Rows that fill no run and no word, several groups; ragged blocks where there are blocks."""
    return [(130, 300), (256, 128)] if scheme.args.weights.strategy == "block" else [(13, 384), (64, 4352)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_repeat_torch_to_the_bit(name: str, dtype: str) -> None:
    scheme = get_scheme(name)
    for shape in shapes_for(scheme):
        weight = heavy_tailed(*shape, dtype)
        expected, _ = reference(scheme, weight, "memoryless_minmax")
        assert same(packed(scheme, weight, dtype, None), expected)


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "FP8", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM"])
def test_scales_that_were_searched_are_used_as_they_are(name: str) -> None:
    scheme = get_scheme(name)
    weight = heavy_tailed(*shapes_for(scheme)[0], "BF16")
    expected, scales = reference(scheme, weight, "memoryless_mse")
    assert same(packed(scheme, weight, "BF16", scales), expected)


def same(got: Mapping[str, bytes], expected: Mapping[str, bytes]) -> bool:
    assert got.keys() == expected.keys()
    differing = [name for name in expected if got[name] != expected[name]]
    assert differing == []
    return True


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM", "MXFP4A16"])
def test_a_weight_that_is_not_finite_is_named(name: str, dtype: str, value: float) -> None:
    weight = heavy_tailed(64, 256, dtype)
    weight[40, 77] = value
    with pytest.raises(InputError, match=r"layer\.weight.*finite"):
        packed(get_scheme(name), weight, dtype, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_is_infinite_where_a_value_is_not_finite(dtype: str) -> None:
    weight = heavy_tailed(8, 256, dtype)
    assert largest_magnitude(kernel_input(bits_of(weight)).reshape(-1), STORAGES[dtype]) == float(
        weight.abs().max()
    )
    for value in (float("nan"), -float("inf")):
        weight[7, 3] = value
        largest = largest_magnitude(kernel_input(bits_of(weight)).reshape(-1), STORAGES[dtype])
        assert largest == np.inf


def test_every_code_is_the_nearest_number_with_ties_to_even() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    between = (codes[1:] + codes[:-1]) / 2
    for value in torch.cat([codes, between, between * (1 + 1e-6), torch.tensor([500.0, 1e30])]).tolist():
        expected = int(torch.tensor(min(value, 448.0)).to(torch.float8_e4m3fn).view(torch.uint8))
        assert e4m3_code(F32(value), F32(1)) == expected
        assert e4m3_code(F32(-value), F32(1)) == expected | 0x80
        assert e4m3_value(np.uint8(expected)) == min(codes.tolist(), key=lambda c: abs(c - codes[expected]))
    assert E4M3.high == codes[-1]


def test_e2m1_ties_go_to_the_even_mantissa() -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 100.0: 7}
    for value, code in ties.items():
        assert e2m1_code(F32(value), F32(1)) == code
        assert e2m1_code(F32(-value), F32(1)) == code | 8
    assert E2M1.high == 6


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_become_a_stream_of_bits(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 37).astype(np.uint8)
    data = np.zeros(40, np.uint8)
    pack_bits(codes, bits, data)
    stream = int.from_bytes(data.tobytes(), "little")
    assert [stream >> (i * bits) & (2**bits - 1) for i in range(37)] == codes.tolist()
    assert stream >> (37 * bits) == 0


def test_runs_cover_a_weight_once() -> None:
    member = LinearPlan(name="a", weight="a.weight", out_features=70_001, in_features=1000)
    parts = list(runs(member, 128))
    assert parts[0].start == 0
    assert parts[-1].stop == 70_001
    assert all(part.start % 128 == 0 for part in parts)
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
