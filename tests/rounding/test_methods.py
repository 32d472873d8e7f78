"""How strong a refit is."""

from pathlib import Path

import pytest

from tests.models import save_llama
from vexport.plan import Settings
from vexport.plan.source import plan_headers
from vexport.rounding.settings import GPTQ, REFITS, Strength, strength_of
from vexport.scenario import Rule
from vexport.types import silent


@pytest.mark.parametrize(("scheme", "bits"), [("W4A16", 16), ("W8A8", 8), ("NVFP4", 4), ("MXFP4", 4)])
def test_a_refit_is_as_strong_as_the_table_says_and_a_rule_may_say_another(
    scheme: str, bits: int, tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "llama")

    def found(rounding: object) -> Strength:
        rule = Rule.model_validate({"match": "Linear", "scheme": scheme, "rounding": rounding})
        _, plan = plan_headers(str(folder), [rule], Settings(), silent)
        (strength,) = {strength_of(group) for group in plan.groups}
        return strength

    assert found("gptq") == GPTQ
    assert found("refit") == REFITS[bits]
    assert found({"strength": 0.75}).strength == 0.75
    assert found({"method": "refit", "strength": 1, "ridge": 0.01}).ridge == 0.01


@pytest.mark.parametrize("rounding", [{"strength": 1.5}, {"ridge": 0}, {"method": "gptq", "strength": 0.5}])
def test_what_is_no_strength_is_refused(rounding: object) -> None:
    with pytest.raises(ValueError, match="strength|ridge|refit"):
        Rule.model_validate({"match": "Linear", "scheme": "W4A16", "rounding": rounding})
