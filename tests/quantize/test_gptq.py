"""GPTQ, compared with llm-compressor's GPTQ. Golden values were recorded from version 0.14."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vexport.formats.packing.base import Scales
from vexport.formats.schemes import get_scheme
from vexport.quantize.gptq import (
    BLOCK_COLUMNS,
    GPTQ,
    Grid,
    factorize,
    grid_of,
    round_blocks,
    round_columns,
    round_nearest,
)
from vexport.quantize.moments import Moments

GOLDEN = load_file(Path(__file__).parent / "golden" / "values.safetensors")
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", "NVFP4A16", "MXFP4A16", "FP8_BLOCK")
DEAD = 17


def grid(name: str, scheme: str) -> Grid:
    given = {key.removeprefix(f"{name}/"): value.numpy() for key, value in GOLDEN.items()}
    scales = Scales(
        scale=given["scale"], zero_point=given["zero_point"], global_scale=given.get("global_scale")
    )
    shape = (GOLDEN["weight"].shape[0], GOLDEN["weight"].shape[1])
    return grid_of(get_scheme(scheme).args.weights, scales, shape, torch.float32)


def codes(weight: torch.Tensor, found: Grid) -> torch.Tensor:
    """Return a rounded weight in units of its scales, without the dead column.

    llm-compressor sets columns without input to zero. vexport rounds them to nearest.
    """
    scale = found.scale.repeat_interleave(found.width, dim=1)
    alive = [column for column in range(weight.shape[1]) if column != DEAD]
    return (weight / scale)[:, alive]


def equal_share(weight: torch.Tensor, other: torch.Tensor, found: Grid) -> float:
    return float(torch.isclose(codes(weight, found), codes(other, found), atol=1e-3).float().mean())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_equal_llm_compressors(scheme: str) -> None:
    found = grid(scheme, scheme)
    factor = factorize(GOLDEN["hessian"], GPTQ.ridge)
    assert factor is not None
    assert factor.dead == 1
    rounded = round_columns(GOLDEN["weight"], factor, found)
    assert equal_share(rounded, GOLDEN[f"{scheme}/rounded"], found) >= 0.999
    nearest = round_nearest(GOLDEN["weight"], found)
    assert equal_share(nearest, GOLDEN[f"{scheme}/rounded"], found) < 0.98
    by_products = GOLDEN["weight"][:, factor.order]
    round_blocks(by_products, factor, found)
    assert equal_share(by_products[:, factor.order.argsort()], rounded, found) >= 0.999


def test_dead_column_is_rounded_to_nearest() -> None:
    found = grid("W4A16", "W4A16")
    factor = factorize(GOLDEN["hessian"], GPTQ.ridge)
    assert factor is not None
    rounded = round_columns(GOLDEN["weight"], factor, found)
    assert torch.equal(rounded[:, DEAD], round_nearest(GOLDEN["weight"], found)[:, DEAD])


def test_indefinite_hessian_has_no_factor() -> None:
    """For such a Hessian, llm-compressor rounds to nearest, and so does vexport, with a warning."""
    assert GOLDEN["indefinite/fallback"].all()
    indefinite = GOLDEN["hessian"].clone()
    indefinite[0, 1] = indefinite[1, 0] = 1e3
    assert factorize(indefinite, GPTQ.ridge) is None
    found = grid("indefinite", "W4A16")
    nearest = round_nearest(GOLDEN["weight"], found)
    assert equal_share(nearest, GOLDEN["indefinite/rounded"], found) == 1.0


def test_damping_is_increased_before_fallback() -> None:
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    singular = (inputs.T @ inputs - 0.02 * torch.eye(64)).to(torch.float32)
    factor = factorize(singular, 1e-4)
    assert factor is not None
    assert factor.damping > 1e-4
    assert torch.isfinite(factor.upper).all()


@pytest.mark.parametrize("columns", [8, 2 * BLOCK_COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighs", [False, True])
def test_moments_weight_tokens(columns: int, dtype: torch.dtype, weighs: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = [torch.randn(2, 16, columns, generator=generator).to(dtype) for _ in range(3)]
    weights = torch.exp2(torch.arange(32) % 8 - 4.0) if weighs else torch.ones(32)
    moments = Moments.zeros(columns, drift=True)
    for row in rows:
        moments.add(row, row.flip(0), weights=weights if weighs else None)
    moments.add(rows[0], rows[0], share=0.5)
    moments.complete()
    own = torch.cat(rows).reshape(-1, columns).double()
    first = rows[0].reshape(-1, columns).double()
    source = torch.cat([row.flip(0) for row in rows]).reshape(-1, columns).double()
    weighed = own * weights.repeat(3)[:, None]
    assert moments.tokens == 96
    assert torch.equal(moments.hessian, moments.hessian.T)
    torch.testing.assert_close(
        moments.hessian.double(), weighed.T @ own + first.T @ first / 2, rtol=1e-4, atol=1e-3
    )
    assert moments.drift is not None
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        moments.drift.double(), weighed.T @ (source - own), rtol=tolerance, atol=200 * tolerance
    )
