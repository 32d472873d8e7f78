"""No scheme loses more of a weight than llm-compressor does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.formats.pack import as_scales, pack
from tests.formats.test_golden import VALUES, same_weights
from vexport.formats.schemes import get_scheme, scheme_names
from vexport.observers import load_observer

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
