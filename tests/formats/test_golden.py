"""Packing equals compressed-tensors' to the bit (0.19, which packs all widths as vLLM reads them).

No scheme loses more of a weight than llm-compressor does.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.formats.pack import as_scales, pack
from vexport.formats.dequantize import unpack_int32
from vexport.formats.schemes import get_scheme, scheme_names
from vexport.numerics.codes import pack_bits
from vexport.observers import QParamsDict, load_observer

VALUES = load_file(Path(__file__).parent / "golden" / "values.safetensors")


def given(scheme: str) -> QParamsDict:
    scale = VALUES[f"{scheme}/qparams/scale"]
    zeros = torch.zeros(scale.shape, dtype=torch.int32)
    return QParamsDict(
        scale=scale,
        zero_point=VALUES.get(f"{scheme}/qparams/zero_point", zeros).to(torch.int32),
        global_scale=VALUES.get(f"{scheme}/qparams/global_scale"),
    )


def same_weights(scheme: str) -> str:
    """The scheme itself, or one of those that the peer has and that stores weights alike."""
    peers = dict.fromkeys(name.partition("/")[0] for name in VALUES if "/" in name)
    known = [name for name in peers if get_scheme(name).args.weights == get_scheme(scheme).args.weights]
    return scheme if scheme in known else known[0]


def golden(scheme: str) -> Mapping[str, torch.Tensor]:
    prefix = f"{scheme}/stored/"
    return {name.removeprefix(prefix): value for name, value in VALUES.items() if name.startswith(prefix)}


@pytest.mark.parametrize("scheme", scheme_names())
def test_stored_tensors(scheme: str) -> None:
    weight = VALUES["ragged" if scheme == "FP8_BLOCK" else "weight"]
    peer = same_weights(scheme)
    stored, expected = pack(get_scheme(scheme), weight, as_scales(given(peer))), golden(peer)
    assert stored.keys() == expected.keys()
    for name, value in stored.items():
        assert value.dtype == expected[name].dtype, name
        same = value.contiguous().view(torch.uint8) == expected[name].view(torch.uint8)
        assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} bytes differ"


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_what_is_packed_comes_back(bits: int, columns: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, columns)).astype(np.uint8)
    packed = np.zeros((3, -(-columns * bits // 32) * 4), np.uint8)
    for row, target in zip(codes, packed, strict=True):
        pack_bits(row, bits, target)
    words = torch.from_numpy(packed.view(np.int32))
    assert torch.equal(unpack_int32(words, bits, columns), torch.from_numpy(codes.astype(np.int64)))


PEER = json.loads((Path(__file__).parent / "golden" / "errors.json").read_text())
# The peer's scales and ranges are rounded to bf16 on the way, vexport's are not: which of two neighbouring
# scales a group gets differs then, to the better or worse of either.
CHANCE = 1e-3
OBSERVERS = ("memoryless_minmax", "memoryless_mse")


def test_the_peers_schemes_are_all() -> None:
    assert PEER.keys() == {same_weights(scheme) for scheme in scheme_names()}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("scheme", scheme_names())
def test_error_is_not_above_the_peers(scheme: str, observer: str) -> None:
    weight = VALUES["ragged" if scheme == "FP8_BLOCK" else "weight"].to(torch.bfloat16)
    args, format_ = get_scheme(scheme).args, get_scheme(scheme).format.name
    weights = replace(args.weights, scale_dtype="bfloat16") if format_ == "pack-quantized" else args.weights
    qparams = load_observer(observer, "weight", weights).forward(weight).get_qparams()
    stored = pack(get_scheme(scheme), weight, as_scales(qparams))
    back = get_scheme(scheme).format.dequantize(args, stored).double()
    exact = weight.double()
    error = float((back - exact).square().sum() / exact.square().sum())
    assert error <= PEER[same_weights(scheme)][observer] * (1 + CHANCE)
