"""The kernels pack the same bits as compressed-tensors' compressors with the same scales.

Golden values are from version 0.19, which packs all widths in vLLM's layout. No scheme loses more
of a weight than llm-compressor.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file

from vexport.checkpoint.tensors import TORCH_DTYPES, as_tensor
from vexport.errors import InputError
from vexport.formats.dequantize import ct_scheme, unpack_int32
from vexport.formats.input_rounding import InputRounding, round_activations
from vexport.formats.packing.base import STORAGES, Array, PackingInputs, Scales, kernel_input
from vexport.formats.schemes import Scheme, all_schemes, get_scheme, scheme_names
from vexport.numerics.arithmetic import (
    e2m1_code,
    e4m3_code,
    e4m3_value,
    largest_magnitude,
    pack_bits,
)
from vexport.numerics.number_formats import E2M1, E4M3, F32
from vexport.observers import QParamsDict, load_observer
from vexport.quantize.scale_search import scales_of
from vexport.quantize.stream import row_chunks
from vexport.records import LinearPlan

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def bits_of(weight: torch.Tensor) -> Array:
    """Return the weight in the form that a reader returns."""
    return weight.numpy() if weight.dtype == torch.float32 else weight.view(torch.uint16).numpy()


def pack(scheme: Scheme, weight: torch.Tensor, scales: Scales | None) -> dict[str, torch.Tensor]:
    """Return all stored tensors of a weight. The rows are packed in several runs, in reverse order.

    Without `scales`, the scales of the rows' ranges are computed while packing.
    """
    rows, columns = weight.shape
    member = LinearPlan(name="layer", weight="layer.weight", out_features=rows, in_features=columns)
    dtype, view, args = NAMES[weight.dtype], bits_of(weight), scheme.args.weights
    known = PackingInputs(scales=scales)
    if scales is None and args.shares_scale:
        known = PackingInputs(
            largest=np.float32(largest_magnitude(kernel_input(view).reshape(-1), STORAGES[dtype]))
        )
    packing = scheme.format.packing(member, dtype, args, known)
    step = packing.multiple * max(1, rows // packing.multiple // 3)
    parts = {
        start: packing.pack(kernel_input(view[start : start + step]), start)
        for start in reversed(range(0, rows, step))
    }
    first, *others = (
        spec for spec in scheme.layout(member, dtype) if not spec.name.startswith("layer.input")
    )
    data = {
        first: np.concatenate([parts[start].reshape(-1).view(np.uint8) for start in sorted(parts)])
    }
    for spec in others:
        tensor = np.ascontiguousarray(packing.tensor(spec.name.removeprefix("layer.")))
        data[spec] = tensor.reshape(-1).view(np.uint8)
    return {
        spec.name.removeprefix("layer."): as_tensor(value, spec) for spec, value in data.items()
    }


# Widths that fill a word. For other widths, the pinned compressed-tensors leaves bits empty.
SCHEMES = [scheme.name for scheme in all_schemes() if 32 % scheme.args.weights.num_bits == 0]
DTYPES = ("BF16", "F16", "F32")


def heavy_tailed(rows: int, columns: int, dtype: str) -> torch.Tensor:
    """Return normal values with outliers, zero rows, zero groups, and rows down to subnormals."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight = torch.where(torch.rand(weight.shape, generator=generator) > 0.99, weight * 30, weight)
    weight[1] = 0
    weight[2, : columns // 2] = -0.0
    weight[3] *= 1e-4 if dtype == "F16" else 1e-35
    weight[4, :64] *= 1e-6
    return weight.to(TORCH_DTYPES[dtype])


def observed(scheme: Scheme, weight: torch.Tensor) -> QParamsDict:
    """Return the scales of min-max ranges.

    Scales of packed integers are rounded to their stored dtype.
    """
    observer = load_observer("memoryless_minmax", "weight", scheme.args.weights)
    observer.observe(weight)
    qparams = observer.qparams()
    if scheme.format.name == "pack-quantized":
        qparams["scale"] = qparams["scale"].to(weight.dtype)
    return qparams


def reference(scheme: Scheme, weight: torch.Tensor, qparams: QParamsDict) -> dict[str, bytes]:
    """Return compressed-tensors' tensors for a weight in float32 with the same scales."""
    args = ct_scheme(scheme.args).weights
    state = {"weight": weight.to(torch.float32), "weight_scale": qparams["scale"]}
    if not args.symmetric:
        state["weight_zero_point"] = qparams["zero_point"].to(torch.int8)
    if qparams["global_scale"] is not None:
        state["weight_global_scale"] = qparams["global_scale"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format.name)
    stored = compressor.compress(state, ct_scheme(scheme.args))
    layer = LinearPlan(
        name="layer",
        weight="layer.weight",
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )
    names = [spec.name.removeprefix("layer.") for spec in scheme.layout(layer, NAMES[weight.dtype])]
    return {name: bytes_of(stored[name]) for name in names if not name.startswith("input")}


def bytes_of(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def shapes_for(scheme: Scheme) -> list[tuple[int, int]]:
    """Return shapes whose rows fill no run and no word, with several groups.

    For schemes with blocks, the last blocks are incomplete.
    """
    return (
        [(130, 300), (256, 128)]
        if scheme.args.weights.strategy == "block"
        else [(13, 384), (64, 4352)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_equal_compressed_tensors(name: str, dtype: str) -> None:
    scheme = get_scheme(name)
    for shape in shapes_for(scheme):
        weight = heavy_tailed(*shape, dtype)
        expected = reference(scheme, weight, observed(scheme, weight))
        assert_same(pack(scheme, weight, None), expected)


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, bytes]) -> None:
    assert got.keys() == expected.keys()
    for name, data in expected.items():
        stored = bytes_of(got[name])
        if got[name].dtype == torch.uint8 and name == "weight_packed":
            stored, data = without_negative_zeros(stored), without_negative_zeros(data)
        assert stored == data, name


def without_negative_zeros(packed: bytes) -> bytes:
    """Replace -0 by 0 in e2m1 codes, two per byte.

    compressed-tensors loses the sign of a zero, which kernels keep.
    """
    codes = np.frombuffer(packed, np.uint8)
    halves = (np.where(half == 8, 0, half).astype(np.uint8) for half in (codes & 15, codes >> 4))
    low, high = halves
    return bytes((low | high << 4).tobytes())


def test_zero_scale_packs_zero_codes() -> None:
    weight = torch.full((2, 128), 1e-40, dtype=torch.bfloat16)
    stored = pack(get_scheme("W8A16"), weight, None)
    assert not stored["weight_scale"].any()
    assert set(bytes_of(stored["weight_packed"])) == {128}


@pytest.mark.parametrize(
    ("dtype", "value"), [("BF16", float("nan")), ("F16", float("inf")), ("F32", -float("inf"))]
)
@pytest.mark.parametrize(
    "name", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM", "MXFP4A16"]
)
def test_non_finite_weight_is_named(name: str, dtype: str, value: float) -> None:
    weight = heavy_tailed(64, 256, dtype)
    weight[40, 77] = value
    with pytest.raises(InputError, match=r"layer\.weight.*finite"):
        pack(get_scheme(name), weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_value_has_infinite_magnitude(dtype: str) -> None:
    weight = heavy_tailed(8, 256, dtype)
    assert largest_magnitude(kernel_input(bits_of(weight)).reshape(-1), STORAGES[dtype]) == float(
        weight.abs().max()
    )
    for value in (float("nan"), -float("inf")):
        weight[7, 3] = value
        largest = largest_magnitude(kernel_input(bits_of(weight)).reshape(-1), STORAGES[dtype])
        assert largest == np.inf


def test_codes_are_nearest_numbers() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    between = (codes[1:] + codes[:-1]) / 2
    for value in torch.cat(
        [codes, between, between * (1 + 1e-6), torch.tensor([500.0, 1e30])]
    ).tolist():
        expected = int(torch.tensor(min(value, 448.0)).to(torch.float8_e4m3fn).view(torch.uint8))
        assert e4m3_code(F32(value), F32(1)) == expected
        assert e4m3_code(F32(-value), F32(1)) == expected | 0x80
        assert e4m3_value(np.uint8(expected)) == min(
            codes.tolist(), key=lambda c: abs(c - codes[expected])
        )
    assert E4M3.high == codes[-1]
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 100.0: 7}
    for value, code in ties.items():
        assert e2m1_code(F32(value), F32(1)) == code
        assert e2m1_code(F32(-value), F32(1)) == code | 8
    assert E2M1.high == 6


def test_runs_cover_a_weight_once() -> None:
    member = LinearPlan(name="a", weight="a.weight", out_features=70_001, in_features=1000)
    parts = list(row_chunks(member, 128))
    assert parts[0].start == 0
    assert parts[-1].stop == 70_001
    assert all(part.start % 128 == 0 for part in parts)
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4"])
def test_e2m1_inputs_equal_compressed_tensors(scheme: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(3, 50, 96, generator=generator) * 4).to(torch.bfloat16)
    value[0, 1] = 0.0
    value[1, 2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    args = ct_scheme(get_scheme(scheme).args).input_activations
    assert args is not None
    own = {"input_global_scale": torch.tensor([100.0])} if scheme == "NVFP4" else {}
    module = torch.nn.Linear(1, 1)
    exact = value.to(torch.float32).reshape(1, -1, 96)
    with torch.compiler.set_stance("force_eager"):
        global_scale = own.get("input_global_scale")
        scale, zero = compute_dynamic_scales_and_zp(exact, args, module, global_scale=global_scale)
        expected = fake_quantize(exact, scale, zero, args, global_scale=global_scale)
    rounded = round_activations(value, args, own, module)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, expected.reshape(value.shape).to(torch.bfloat16))


def test_shared_input_is_rounded_once() -> None:
    args = ct_scheme(get_scheme("MXFP4").args).input_activations
    assert args is not None
    rounding, module = InputRounding(args, {}), torch.nn.Linear(1, 1)
    value = torch.linspace(-3, 3, 64).reshape(1, 2, 32)
    (first,), (second,) = rounding.hook(module, (value,)), rounding.hook(module, (value,))
    assert second is first
    assert torch.equal(first, round_activations(value, args, {}, module))
    (other,) = rounding.hook(module, (2 * value,))
    assert torch.equal(other, 2 * first)


VALUES = load_file(Path(__file__).parent / "golden" / "values.safetensors")


def recorded_qparams(scheme: str) -> QParamsDict:
    scale = VALUES[f"{scheme}/qparams/scale"]
    zeros = torch.zeros(scale.shape, dtype=torch.int32)
    return QParamsDict(
        scale=scale,
        zero_point=VALUES.get(f"{scheme}/qparams/zero_point", zeros).to(torch.int32),
        global_scale=VALUES.get(f"{scheme}/qparams/global_scale"),
    )


def scheme_of_peer(scheme: str) -> str:
    """Return the scheme itself, or a recorded scheme that stores weights in the same form."""
    peers = dict.fromkeys(name.partition("/")[0] for name in VALUES if "/" in name)
    known = [
        name for name in peers if get_scheme(name).args.weights == get_scheme(scheme).args.weights
    ]
    return scheme if scheme in known else known[0]


def stored_by_peer(scheme: str) -> Mapping[str, torch.Tensor]:
    prefix = f"{scheme}/stored/"
    return {
        name.removeprefix(prefix): value
        for name, value in VALUES.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("scheme", scheme_names())
def test_stored_tensors_equal_golden(scheme: str) -> None:
    weight = VALUES["ragged" if scheme == "FP8_BLOCK" else "weight"]
    peer = scheme_of_peer(scheme)
    stored, expected = (
        pack(get_scheme(scheme), weight, scales_of(recorded_qparams(peer))),
        stored_by_peer(peer),
    )
    assert stored.keys() == expected.keys()
    for name, value in stored.items():
        assert value.dtype == expected[name].dtype, name
        same = value.contiguous().view(torch.uint8) == expected[name].view(torch.uint8)
        assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} bytes differ"


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_packed_codes_are_unpacked(bits: int, columns: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, columns)).astype(np.uint8)
    packed = np.zeros((3, -(-columns * bits // 32) * 4), np.uint8)
    for row, target in zip(codes, packed, strict=True):
        pack_bits(row, bits, target)
    words = torch.from_numpy(packed.view(np.int32))
    assert torch.equal(unpack_int32(words, bits, columns), torch.from_numpy(codes.astype(np.int64)))


PEER = json.loads((Path(__file__).parent / "golden" / "errors.json").read_text())
# llm-compressor rounds scales and ranges to bfloat16, vexport does not. A group may then get the
# next smaller or larger scale, so that either error can be slightly larger.
TOLERANCE = 1e-3
OBSERVERS = ("memoryless_minmax", "memoryless_mse")


def test_all_schemes_have_recorded_errors() -> None:
    assert PEER.keys() == {scheme_of_peer(scheme) for scheme in scheme_names()}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("scheme", scheme_names())
def test_error_is_at_most_llm_compressors(scheme: str, observer: str) -> None:
    weight = VALUES["ragged" if scheme == "FP8_BLOCK" else "weight"].to(torch.bfloat16)
    args, format_ = get_scheme(scheme).args, get_scheme(scheme).format.name
    weights = (
        replace(args.weights, scale_dtype="bfloat16")
        if format_ == "pack-quantized"
        else args.weights
    )
    searching = load_observer(observer, "weight", weights)
    searching.observe(weight)
    stored = pack(get_scheme(scheme), weight, scales_of(searching.qparams()))
    back = get_scheme(scheme).format.dequantize(args, stored).double()
    exact = weight.double()
    error = float((back - exact).square().sum() / exact.square().sum())
    assert error <= PEER[scheme_of_peer(scheme)][observer] * (1 + TOLERANCE)
