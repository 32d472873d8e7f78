"""Statistics are those of a whole-model run, whatever the family, and weights are searched by importance."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.calibration.make import batches_of, plan_for, samples
from tests.calibration.models import configs, save, whole_model_run
from vexport.calibration import calibrate
from vexport.calibration.walk import LayerWalk
from vexport.files import from_json, to_json, write_text
from vexport.quantize.job import QuantizeJob, write_checkpoint
from vexport.records import CalibrationRecord, InputRange

pytestmark = pytest.mark.usefixtures("own_products")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(configs()["llama"], tmp_path_factory.mktemp("llama") / "model")


def decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").copy())


def test_importance_is_the_mean_square_of_a_whole_model_run(llama: Path, tmp_path: Path) -> None:
    index, plan = plan_for(llama, scheme="NVFP4A16", observer="imatrix_mse")
    found = calibrate(LayerWalk(index), plan, samples())
    assert found.ranges == {}
    names = [group.name for group in plan.groups]
    seen = whole_model_run(llama, names, batches_of(samples()))
    assert list(found.importance) == names
    for name in names:
        assert torch.allclose(decode(found.importance[name]), seen[name].squares, rtol=1e-6), name
    write_text(tmp_path / "statistics.json", to_json(found))
    assert from_json(CalibrationRecord, tmp_path / "statistics.json") == found


@pytest.mark.slow
def test_quantize_searches_by_it(llama: Path, tmp_path: Path) -> None:
    """Scales change with importance; without it there is a warning."""
    index, plan = plan_for(llama, scheme="NVFP4A16", observer="imatrix_mse")
    found = calibrate(LayerWalk(index), plan, samples())
    scales = {}
    for name, calibration in (("with", found), ("without", replace(found, importance={}))):
        folder = tmp_path / name
        job = QuantizeJob(source=str(llama), out=folder, rules=())
        if name == "with":
            write_checkpoint(job, index, plan, calibration)
        else:
            with pytest.warns(UserWarning, match="imatrix_mse"):
                write_checkpoint(job, index, plan, calibration)
        tensors = load_file(folder / "model.safetensors")
        scales[name] = tensors[f"{plan.groups[0].name}.weight_scale"].float()
    assert not torch.equal(scales["with"], scales["without"])


@pytest.fixture(scope="module", params=configs())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(configs()[request.param], tmp_path_factory.mktemp("family") / request.param)


def test_ranges_are_those_of_a_whole_model_run(family: Path) -> None:
    index, plan = plan_for(family, head=True)
    assert len(plan.groups) >= 12
    chosen = samples()
    seen = whole_model_run(family, [group.name for group in plan.groups], batches_of(chosen))
    expected = {name: InputRange(low=one.low, high=one.high, tokens=one.tokens) for name, one in seen.items()}
    assert calibrate(LayerWalk(index), plan, chosen).ranges == expected
