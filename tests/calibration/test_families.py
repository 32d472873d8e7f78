"""Layer by layer, statistics equal those of a whole-model run to the bit, whatever the family."""

from pathlib import Path

import pytest
import torch

from tests.calibration.make import batches_of, plan_for, samples
from tests.calibration.models import configs, save, whole_model_run
from vexport.calibration import calibrate
from vexport.calibration.walk import LayerWalk
from vexport.types import InputRange, Plan

pytestmark = pytest.mark.usefixtures("own_products")


@pytest.fixture(scope="module", params=configs())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one family."""
    return save(configs()[request.param], tmp_path_factory.mktemp("family") / request.param)


def names_of(plan: Plan) -> list[str]:
    return [member.name for group in plan.groups for member in group.members]


def reference(folder: Path, plan: Plan, batches: list[torch.Tensor]) -> dict[str, InputRange]:
    seen = whole_model_run(folder, names_of(plan), batches)
    return {name: InputRange(low=one.low, high=one.high, tokens=one.tokens) for name, one in seen.items()}


def test_ranges_are_those_of_a_whole_model_run(family: Path) -> None:
    index, plan = plan_for(family, head=True)
    assert len(plan.groups) >= 12
    chosen = samples()
    assert calibrate(LayerWalk(index), plan, chosen).ranges == reference(family, plan, batches_of(chosen))
