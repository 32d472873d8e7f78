"""Second moments are added up for half of the matrix and are those of all of it."""

import pytest
import torch

from vexport.rounding.moments import BLOCK_COLUMNS, Moments


@pytest.mark.parametrize("columns", [8, BLOCK_COLUMNS, 2 * BLOCK_COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_are_the_products_of_all_tokens(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    rows = [torch.randn(2, 16, columns, generator=generator).to(dtype) for _ in range(3)]
    moments = Moments.zeros(columns, cross=True)
    for row in rows:
        moments.add(row, row.flip(0))
    moments.add(rows[0], rows[0], weight=0.5)
    moments.complete()
    own = torch.cat(rows).reshape(-1, columns).double()
    first = rows[0].reshape(-1, columns).double()
    source = torch.cat([row.flip(0) for row in rows]).reshape(-1, columns).double()
    assert moments.tokens == 96
    assert torch.equal(moments.hessian, moments.hessian.T)
    torch.testing.assert_close(
        moments.hessian.double(), own.T @ own + first.T @ first / 2, rtol=1e-4, atol=1e-3
    )
    assert moments.cross is not None
    torch.testing.assert_close(
        moments.cross.double(), own.T @ source + first.T @ first / 2, rtol=1e-4, atol=1e-3
    )
