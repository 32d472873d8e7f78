"""Second moments are added up for half of the matrix and are those of all of it."""

import pytest
import torch

from vexport.rounding.moments import BLOCK_COLUMNS, Moments


@pytest.mark.parametrize("columns", [8, BLOCK_COLUMNS, 2 * BLOCK_COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_are_the_products_of_all_tokens(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = [torch.randn(2, 16, columns, generator=generator).to(dtype) for _ in range(3)]
    moments = Moments.zeros(columns, drift=True)
    for row in rows:
        moments.add(row, row.flip(0))
    moments.add(rows[0], rows[0], share=0.5)
    moments.complete()
    own = torch.cat(rows).reshape(-1, columns).double()
    first = rows[0].reshape(-1, columns).double()
    source = torch.cat([row.flip(0) for row in rows]).reshape(-1, columns).double()
    assert moments.tokens == 96
    assert torch.equal(moments.hessian, moments.hessian.T)
    torch.testing.assert_close(
        moments.hessian.double(), own.T @ own + first.T @ first / 2, rtol=1e-4, atol=1e-3
    )
    assert moments.drift is not None
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        moments.drift.double(), own.T @ (source - own), rtol=tolerance, atol=200 * tolerance
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_count_by_their_weights(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    quantized, source = (torch.randn(1, 16, 8, generator=generator).to(dtype) for _ in range(2))
    weights = torch.exp2(torch.arange(16) - 8.0)
    moments = Moments.zeros(8, drift=True)
    moments.add(quantized, source, weights=weights)
    moments.complete()
    own, exact = quantized[0].double(), source[0].double()
    assert moments.tokens == 16
    assert moments.drift is not None
    torch.testing.assert_close(
        moments.hessian.double(), own.T @ torch.diag(weights.double()) @ own, rtol=1e-5, atol=1e-5
    )
    change = own.T @ torch.diag(weights.double()) @ (exact - own)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(moments.drift.double(), change, rtol=tolerance, atol=200 * tolerance)
