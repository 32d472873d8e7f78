"""`check --source` on vexport's output: large changes are a warning if the digests match."""

import json
from pathlib import Path

import pytest
import torch

from tests.command import findings, vexport
from tests.models import quantize, save_llama, write_calibration
from tests.mutations.edits import put, spoiled
from vexport.outputs.digests import digest_of

LAYER = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("own") / "llama")


@pytest.fixture(scope="module")
def rounded(source: Path) -> Path:
    text = write_calibration(source.with_name("text.jsonl"), rows=7, vocabulary=40)
    return quantize(
        source, source.with_name("out"), "W4A16", "--rounding", "refit", "--calibration", text
    )


def severities(checkpoint: Path, source: Path) -> dict[str, str]:
    """Return the severities of findings of the comparison with the source, without summaries."""
    listed = findings(checkpoint, "--source", source)
    return {
        each["where"]: each["severity"]
        for each in listed
        if each["check"] == "source" and each["fix"]
    }


def record(checkpoint: Path, **changes: object) -> None:
    """Change vexport.json, and update the digests of the weights."""
    file = checkpoint / "vexport.json"
    recipe = json.loads(file.read_text())
    recipe["digests"] = {each.name: digest_of(each) for each in checkpoint.glob("*.safetensors")}
    file.write_text(json.dumps(recipe | changes))


@pytest.fixture
def moved(rounded: Path, tmp_path: Path) -> Path:
    """Return a checkpoint with uneven scales in one layer, like after a refit with little text."""
    return spoiled(rounded, tmp_path / "moved", put(f"{LAYER}.weight_scale", alternate))


def alternate(scale: torch.Tensor) -> torch.Tensor:
    return (scale * torch.tensor([[1.4, 0.6]])).to(scale.dtype)


def test_changed_weights_with_digests_are_warning(moved: Path, source: Path) -> None:
    assert severities(moved, source) == {LAYER: "error"}
    record(moved)
    assert severities(moved, source) == {LAYER: "warning"}
    assert vexport("check", moved, "--source", source, "--static").code == 0


@pytest.mark.parametrize(
    ("rounding", "severity"),
    [
        (None, "warning"),  # the default for four bits with calibration text is a refit
        ("gptq", "warning"),
        ({"method": "refit", "strength": 0.5}, "warning"),
        ("nearest", "error"),
        (["refit"], "error"),
    ],
)
def test_severity_follows_recorded_rounding(
    moved: Path, source: Path, rounding: object, severity: str
) -> None:
    scenario = json.loads((moved / "vexport.json").read_text())["scenario"]
    for rule in scenario["rules"]:
        rule["rounding"] = rounding
    record(moved, scenario=scenario)
    assert severities(moved, source) == {LAYER: severity}


def test_repaired_weights_are_error(moved: Path, source: Path) -> None:
    record(moved, repaired=True)
    assert severities(moved, source) == {LAYER: "error"}


def test_other_source_is_error(rounded: Path, source: Path, tmp_path: Path) -> None:
    """Config and headers are equal, but the weights differ.

    The digests are no evidence for this source.
    """
    other = spoiled(
        source, tmp_path / "other", put(f"{LAYER}.weight", lambda weight: weight.flip(0))
    )
    assert severities(rounded, other) == {LAYER: "error"}
