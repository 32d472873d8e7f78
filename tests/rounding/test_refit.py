"""A full refit is brevitas' Qronos, whose golden values were recorded.

Qronos chooses the first column for the others as they were, without damping, and refits the others to it;
here all columns are refitted, then rounded one after another. Where both round the first column of a row
alike, all others follow from the same formula.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from vexport.numerics.arithmetic import integer_format
from vexport.rounding.gptq import Factor, Grid, factorize, refit, round_columns
from vexport.rounding.moments import Moments

GOLDEN = load_file(Path(__file__).parent / "golden" / "qronos.safetensors")
WEIGHT, HESSIAN, CROSS = GOLDEN["weight"], GOLDEN["hessian"], GOLDEN["cross"]
RIDGE = float(GOLDEN["damping"] / HESSIAN.diagonal().mean())
SCALE = GOLDEN["scale"].repeat_interleave(16, dim=1)


def factor() -> Factor:
    found = factorize(HESSIAN, RIDGE)
    assert found is not None
    return found


def codes(values: torch.Tensor) -> torch.Tensor:
    return torch.round(values / SCALE)


def rounded(strength: float) -> torch.Tensor:
    """The weight in 4 bits after a refit of some strength."""
    moments = Moments(hessian=HESSIAN, drift=CROSS - HESSIAN, tokens=1)
    wanted = refit(WEIGHT, moments, strength=strength, ridge=RIDGE)
    scale = GOLDEN["scale"].numpy()
    form = integer_format(4, symmetric=True)
    return round_columns(wanted, factor(), Grid(form=form, scale=scale, zero=0 * scale, width=16))


def error(values: torch.Tensor) -> float:
    """|X W^T - X~ Q^T|^2 less |X W^T|^2, which no Q changes."""
    return float((values @ HESSIAN * values).sum() - 2 * (values @ CROSS * WEIGHT).sum())


def test_codes_are_those_of_qronos() -> None:
    found, expected = codes(rounded(1.0)), codes(GOLDEN["rounded"])
    first = factor().order[0]
    same = found[:, first] == expected[:, first]
    # So many that what follows is about most rows.
    assert same.float().mean() > 0.6
    assert (found == expected)[same].float().mean() >= 0.999


def test_the_output_is_as_close_to_the_sources() -> None:
    qronos, full, gptq = (error(values) for values in (GOLDEN["rounded"], rounded(1.0), rounded(0.0)))
    assert qronos < gptq
    assert full < qronos + 0.02 * (gptq - qronos)
