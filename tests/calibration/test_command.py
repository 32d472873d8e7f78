"""What the command line and a scenario say about calibration reaches it."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.calibration.make import samples
from tests.calibration.models import expert_configs, save
from tests.command import vexport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts and samples that reach all of them."""
    root = tmp_path_factory.mktemp("command")
    rows = [json.dumps({"input_ids": ids}) for ids in samples((30, 41, 35)).token_ids]
    (root / "samples.jsonl").write_text("\n".join(rows))
    save(expert_configs()["qwen3_moe"], root / "model")
    return root


def input_scales(folder: Path, out: Path, *options: str) -> dict[str, float]:
    command = ("quantize", folder / "model", out, "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", folder / "samples.jsonl", *options)
    assert ran.code == 0, ran.stderr
    tensors = load_file(out / "model.safetensors")
    return {name: float(value) for name, value in tensors.items() if name.endswith("input_scale")}


def test_routed_tokens_are_fewer_than_all(folder: Path, tmp_path: Path) -> None:
    every = input_scales(folder, tmp_path / "all")
    routed = input_scales(folder, tmp_path / "routed", "--no-calibrate-all-experts", "--device", "cpu")
    assert every.keys() == routed.keys()
    experts = {name for name in every if ".experts." in name}
    assert len(experts) == 2 * 8 * 3
    assert all(routed[name] <= every[name] for name in experts)
    assert any(routed[name] < every[name] for name in experts)
    assert {name: every[name] for name in every.keys() - experts} == {
        name: routed[name] for name in every.keys() - experts
    }


def test_the_answer_says_how_far_the_experts_were_reached(folder: Path, tmp_path: Path) -> None:
    """In the sentences of a run's report; without samples nothing is said."""
    command = ("quantize", folder / "model", "--quiet", "--calibration", folder / "samples.jsonl")
    lines = vexport(*command, tmp_path / "some", "--scheme", "FP8").stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'some'}: FP8: ")
    (told,) = [line for line in lines if "experts" in line]
    reached = r"[1-9]\d* to \d+ calibration tokens routed to each, median \d+"
    assert re.fullmatch(rf"experts +16 experts in 2 layers: {reached}", told.strip())
    ran = vexport(*command, tmp_path / "none", "--scheme", "FP8_DYNAMIC")
    assert "experts" not in ran.stdout


def test_experts_that_no_token_reaches_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text(json.dumps({"input_ids": [5]}))
    command = ("quantize", folder / "model", tmp_path / "out", "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", tmp_path / "few.jsonl")
    assert ran.code == 0, ran.stderr
    assert "16 experts in 2 layers: 0 to 1 calibration tokens routed to each, median 0" in ran.stdout
    assert "no token was routed to 12 experts: model.layers.0.mlp.experts " in ran.stdout


def test_a_device_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    command = ("quantize", folder / "model", tmp_path / "out", "--scheme", "FP8", "--quiet")
    ran = vexport(*command, "--calibration", folder / "samples.jsonl", "--device", "gpu")
    assert ran.code == 2
    assert "device 'gpu': got no use of it" in ran.errors[0]
    assert not (tmp_path / "out").exists()
