"""Each part broken on purpose in the real vLLM: the report names the one that was broken."""

from pathlib import Path

import pytest

from tests.evaluation.faults import (
    DEMO,
    TEMPLATE,
    WRONG_TEMPLATE,
    bad_kernel,
    quantized,
    with_own_global_scales,
    with_template,
)
from vexport.evaluation.attribution import attribute
from vexport.evaluation.drift import Scored
from vexport.records import Attribution
from vexport.run.serving import EngineOptions, Questions, serve_model
from vexport.scenario.serve import Serve

TEXTS = (
    "4 7 + 3 8 = 5 8 0 . the tool of taruna is lever .",
    "the city of ruvek is osaka . 1 1 + 5 1 = 2 6 0 .",
)
OPTIONS = EngineOptions(
    serve=Serve(), vllm_python=None, trust_remote_code=False, on_progress=lambda *step: None
)
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def served(checkpoint: Path, folder: Path) -> Scored:
    found = serve_model(checkpoint.name, checkpoint, folder, OPTIONS, Questions(texts=TEXTS)).scored
    assert found is not None
    return found


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder = tmp_path_factory.mktemp("baseline")
    return served(with_template(DEMO / "model", folder / "model", TEMPLATE), folder / "session")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return with_template(quantized(folder / "plain"), folder / "nvfp4a16", TEMPLATE)


def blamed(baseline: Scored, candidate: Path, folder: Path) -> Attribution:
    found = attribute(baseline, served(candidate, folder / "session"), limit=0.1, outcome="FAIL")
    assert found is not None
    print(found)
    return found


def test_a_bad_kernel(
    baseline: Scored, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(bad_kernel(tmp_path / "plugin")), prepend=":")
    found = blamed(baseline, export, tmp_path)
    assert found.cause == "kernel"


def test_scales_that_the_loader_joins(baseline: Scored, export: Path, tmp_path: Path) -> None:
    found = blamed(baseline, with_own_global_scales(export, tmp_path / "own"), tmp_path)
    assert found.cause == "loader"
    assert "global_scale" in found.reason


def test_a_wrong_chat_template(baseline: Scored, export: Path, tmp_path: Path) -> None:
    wrong = with_template(export, tmp_path / "wrong", WRONG_TEMPLATE)
    assert blamed(baseline, wrong, tmp_path).cause == "harness"
