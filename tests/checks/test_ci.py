"""`vexport check` in CI: annotations stand where the fault is, and no checkpoint hides another."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import vexport
from tests.engine.fixtures import write_tokenizer
from tests.mutations.edits import all_of, element, put, spoiled

DOWN = "model.layers.2.mlp.down_proj"


def test_one_that_is_no_checkpoint_hides_no_other(good: Callable[[str], Path], tmp_path: Path) -> None:
    ran = vexport("check", tmp_path / "none", good("FP8"), "--format", "json", "--quiet")
    none, sound = json.loads(ran.stdout)
    assert (ran.code, none["ok"], sound["ok"]) == (2, False, True)
    assert [finding["check"] for finding in none["findings"]] == ["files"]
    assert [line for line in ran.errors if str(tmp_path / "none") in line] == ran.errors != []


def test_annotations_stand_at_the_file_and_line(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository" / "models" / "broken"
    folder.parent.mkdir(parents=True)
    spoil = put(f"{DOWN}.weight_scale", element(float("nan")))
    broken = spoiled(good("W8A8"), folder, all_of(spoil, write_tokenizer))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 9
    (broken / "config.json").write_text(json.dumps(config, indent=2))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repository"))
    wrong, *_ = vexport("check", broken, "--format", "github").stdout.splitlines()
    lines = (broken / "config.json").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if '"group_0"' in line)
    assert wrong.startswith(f"::error file=models/broken/config.json,line={number},title=")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (broken / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.delenv("GITHUB_WORKSPACE")
    (nan,) = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert nan.startswith("::error file=models/broken/model.safetensors,line=1,title=")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    (outside,) = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert outside.startswith("::error title=")
