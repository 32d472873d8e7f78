"""Towers and projectors that a quantized checkpoint keeps."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import ROOT, Ran, vexport
from tests.models import quantize

MODEL = ROOT / "scenarios" / "demo" / "model-sight"
PROJECTOR = "model.connector.modality_projection.proj.weight"
TOWER = "model.vision_model.encoder.layers.1.mlp.fc1.bias"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(MODEL, tmp_path_factory.mktemp("kept") / "quantized", "FP8_DYNAMIC")


def compared(folder: Path) -> tuple[Ran, dict[str, str], set[str]]:
    """Return the check, the named parts with their descriptions, and the places of errors."""
    ran = vexport("check", folder, "--source", MODEL, "--static", "--format", "json")
    (report,) = json.loads(ran.stdout)
    findings = report["findings"]
    kept = {each["where"]: each["got"] for each in findings if each["rule"] == "source/kept-part"}
    return ran, kept, {each["where"] for each in findings if each["severity"] == "error"}


def test_equal_parts_are_named(quantized: Path) -> None:
    ran, kept, _ = compared(quantized)
    assert ran.code == 0
    assert kept == {
        "model.vision_model": "37 tensors, equal to the source's",
        "model.connector": "1 tensor, equal to the source's",
    }


@pytest.mark.parametrize(("name", "other"), [(PROJECTOR, "vision_model"), (TOWER, "connector")])
def test_changed_parts_are_errors(name: str, other: str, quantized: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(quantized, changed)
    (changed / "vexport.json").unlink()
    tensors = load_file(changed / "model.safetensors")
    tensors[name] = torch.cat([tensors[name][1:], tensors[name][:1]])
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    ran, kept, errors = compared(changed)
    assert ran.code == 1
    assert (set(kept), errors) == ({f"model.{other}"}, {name})


def test_text_models_have_no_parts(tmp_path: Path) -> None:
    source = ROOT / "scenarios" / "demo" / "model"
    folder = quantize(source, tmp_path / "quantized", "FP8_DYNAMIC")
    ran = vexport("check", folder, "--source", source, "--static", "--format", "json")
    assert "source/kept-part" not in ran.stdout
