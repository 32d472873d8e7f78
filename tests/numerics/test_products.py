"""Products of matrices equal products in float64, up to the rounding of float32 sums."""

import numba
import pytest
import torch

from vexport.numerics import products
from vexport.numerics.bf16_products import compiles_bf16_products
from vexport.numerics.products import add_product, product

# (tokens, rows, columns): whole blocks, incomplete blocks, odd tokens, several passes.
SHAPES = [(512, 96, 96), (513, 100, 77), (1300, 50, 200), (7, 3, 1), (1, 8, 48), (0, 9, 9)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES)
def test_sums_of_products_are_float32(
    tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    first, second = torch.randn(tokens, rows).to(dtype), torch.randn(tokens, columns).to(dtype)
    sums = torch.randn(rows, columns)
    exact = sums.double() + 0.25 * first.double().T @ second.double()
    add_product(sums, first, second, alpha=0.25)
    assert torch.allclose(sums.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiles", [compiles_bf16_products(), False])
def test_values_above_the_diagonal_may_be_left_out(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "compiles_bf16_products", lambda: compiles)
    states = torch.randn(300, 290).to(torch.bfloat16)
    sums = torch.zeros(290, 290)
    add_product(sums, states, states, lower=True)
    exact = (states.double().T @ states.double()).tril()
    assert torch.allclose(sums.tril().double(), exact, rtol=1e-5, atol=1e-4)


def test_values_that_are_not_finite_stay_in_their_row_and_column() -> None:
    states = torch.randn(40, 60).to(torch.bfloat16)
    states[3, 7] = torch.nan
    sums = torch.zeros(60, 60)
    add_product(sums, states, states)
    is_finite = torch.isfinite(sums)
    assert not is_finite[7].any()
    assert not is_finite[:, 7].any()
    assert int(is_finite.sum()) == 59 * 59


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    states = torch.randn(700, 300).to(torch.bfloat16)
    made = []
    before = numba.get_num_threads()
    for threads in {1, before}:
        numba.set_num_threads(threads)
        sums = torch.zeros(300, 300)
        add_product(sums, states, states, lower=True)
        made.append(sums.tril())
    numba.set_num_threads(before)
    assert all(torch.equal(sums, made[0]) for sums in made)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 3), (64, 128, 200), (1, 1, 1)])
def test_product_is_float32(rows: int, inner: int, columns: int) -> None:
    first, second = torch.randn(inner, rows).T, torch.randn(inner, columns)
    exact = first.double() @ second.double()
    assert torch.allclose(product(first, second).double(), exact, rtol=1e-5, atol=1e-5)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="got"):
        add_product(torch.zeros(4, 4), torch.zeros(3, 4), torch.zeros(2, 4))
    sums, states = torch.zeros(4, 8), torch.randn(3, 4).to(torch.bfloat16)
    add_product(sums[:, :4], states, states)  # not contiguous
    assert torch.allclose(sums[:, :4].double(), states.double().T @ states.double(), atol=1e-5)
    assert not sums[:, 4:].any()
