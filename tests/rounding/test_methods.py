"""The ways of rounding by name, and which strengths each tries."""

from vexport.rounding.methods import METHODS
from vexport.rounding.settings import CANDIDATES, DEEP, FULL, GPTQ, REFIT
from vexport.types.rounding import ROUNDINGS


def test_every_name_has_a_method() -> None:
    assert tuple(METHODS) == ROUNDINGS


def test_a_refit_never_loses_to_gptq_and_is_tried_in_full_in_few_layers_alone() -> None:
    refit = METHODS["refit"]
    assert refit.recipes(layers=30, held_out=2) == (*CANDIDATES, *DEEP)
    assert CANDIDATES[0] == GPTQ
    assert refit.recipes(layers=3, held_out=2) == (*CANDIDATES, *FULL)


def test_without_rows_to_choose_by_one_strength_runs() -> None:
    assert METHODS["refit"].recipes(layers=30, held_out=0) == (REFIT,)
    assert METHODS["gptq"].recipes(layers=30, held_out=2) == (GPTQ,)
    assert METHODS["nearest"].recipes(layers=30, held_out=2) == ()
