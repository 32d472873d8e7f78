"""`vexport check` in CI.

Annotations are at the line of the fault, and a broken checkpoint does not hide others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from xml.etree import ElementTree

import pytest
import yaml

from tests.command import vexport
from tests.models import Good, write_tokenizer
from tests.mutations.edits import all_of, put, set_first, spoiled
from vexport.checks import CHECKS, Check
from vexport.checks.vllm.view import CheckpointView
from vexport.records import CheckReport, Finding
from vexport.reports import render_checks

ROOT = Path(__file__).parent.parent.parent
DOWN = "model.layers.2.mlp.down_proj"


def test_unreadable_checkpoint_hides_no_other(
    good: Good, tmp_path: Path, three_checkpoints: list[Path]
) -> None:
    ran = vexport("check", tmp_path / "none", good("FP8"), "--format", "json", "--quiet")
    none, sound = json.loads(ran.stdout)
    assert (ran.code, none["ok"], sound["ok"]) == (2, False, True)
    assert [finding["check"] for finding in none["findings"]] == ["files"]
    assert [line for line in ran.errors if str(tmp_path / "none") in line] == ran.errors != []
    ran = vexport(
        "check",
        three_checkpoints[0],
        three_checkpoints[1] / ("x" * 300),
        three_checkpoints[2],
        "--format",
        "json",
    )
    assert ran.code == 2
    assert [report["ok"] for report in json.loads(ran.stdout)] == [True, False, True]


def test_annotations_are_at_the_line(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository" / "models" / "broken"
    folder.parent.mkdir(parents=True)
    spoil = put(f"{DOWN}.weight_scale", set_first(float("nan")))
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
    nan, _ = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert nan.startswith("::error file=models/broken/model.safetensors,line=1,title=")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    outside, _ = vexport("check", "models/broken", "--format", "github").stdout.splitlines()
    assert outside.startswith("::error title=")


def test_annotations_are_in_the_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key or a line may follow the name of a JSON file directly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    places = {
        "tokenizer.json:3": ("tokenizer.json", 3),
        "hf_quant_config.json.quantization": ("hf_quant_config.json", 2),
        "config.json (tp 2)": ("config.json", 1),
        "config.json: quantization_config.bits": ("config.json", 2),
    }
    for name, _ in places.values():
        (folder / name).write_text('{\n"quantization": {}, "bits": 4\n}\n')
    for place, (name, line) in places.items():
        finding = Finding(
            check="files", severity="error", where=f"model/{place}", expected="", got="x", fix="y"
        )
        report = CheckReport(checkpoint="model", ok=False, findings=(finding,))
        (annotation,) = render_checks([report], "github").splitlines()
        assert annotation.startswith(f"::error file=model/{name},line={line},title="), place


def test_notes_do_not_hide_the_pass() -> None:
    note = Finding(check="scheme", severity="info", where="a", got="b", expected="", fix="")
    report = CheckReport(checkpoint="model", ok=True, findings=(note,))
    (notice,) = render_checks([report], "github").splitlines()
    assert notice.startswith("::notice title=vexport check PASS::1 checkpoint without an error")


def run_action(checkpoint: Path, command: str, folder: Path) -> tuple[int, dict[str, str]]:
    """Run the step `gate` of the action in the way of GitHub's runner.

    Return its exit code and outputs.
    """
    action = yaml.safe_load((ROOT / ".github/action/action.yml").read_text())
    step = next(step for step in action["runs"]["steps"] if step.get("id") == "gate")
    assert step["env"] == {
        "COMMAND": "${{ inputs.command }}",
        "CHECKPOINT": "${{ inputs.checkpoint }}",
    }
    folder.mkdir()
    (folder / "step.sh").write_text(step["run"])
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "COMMAND": command,
        "CHECKPOINT": str(checkpoint),
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "step.sh")]
    code = subprocess.run(
        shell, env=environment, cwd=folder, capture_output=True, check=False
    ).returncode
    outputs = dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())
    assert outputs.keys() == action["outputs"].keys()
    return code, outputs


def test_action_outputs(good: Good, tmp_path: Path) -> None:
    broken = spoiled(
        good("W8A8"), tmp_path / "broken", put(f"{DOWN}.weight_scale", set_first(float("nan")))
    )
    checked = "check --static --sm 90"
    for checkpoint, command, code, verdict in (
        (good("W8A8"), checked, 0, "PASS"),
        (broken, checked, 1, "FAIL"),
        (broken, f"{checked} --no-such-option", 2, "ERROR"),
    ):
        folder = tmp_path / f"step-{code}"
        ran, outputs = run_action(checkpoint, command, folder)
        assert (ran, outputs["verdict"]) == (code, verdict)
        assert ("::error" in (Path(outputs["report"]) / "answer.txt").read_text()) == (code == 1)
        assert (folder / "summary.md").exists() == (code < 2)


def raise_for_bad(view: CheckpointView) -> Iterator[Finding]:
    if view.index.root.name == "bad":
        raise KeyError("a mistake of ours")
    yield from ()


@pytest.fixture
def three_checkpoints(good: Good, tmp_path: Path) -> list[Path]:
    """Return three checkpoints. The second checkpoint makes a check raise an exception."""
    copytree(good("W4A16"), tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer_config.json").write_text("[]")
    return [good("W4A16"), tmp_path / "bad", good("FP8_BLOCK")]


def test_exception_in_one_check(
    three_checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a check raises an exception, all output formats keep the other results."""
    monkeypatch.setattr(
        "vexport.checks.CHECKS",
        {**CHECKS, "values": Check(description="values", run=raise_for_bad)},
    )
    ran = vexport("check", *three_checkpoints, "--format", "json")
    assert ran.code == 4
    assert [
        line for line in ran.errors if "internal error in the check values" in line
    ] == ran.errors
    reports = json.loads(ran.stdout)
    assert [report["ok"] for report in reports] == [True, False, True]
    findings = {finding["check"]: finding for finding in reports[1]["findings"]}
    assert set(findings) == {"internal", "tokenizer"}
    assert "KeyError: 'a mistake of ours'" in findings["internal"]["got"]
    junit = ElementTree.fromstring(vexport("check", *three_checkpoints, "--format", "junit").stdout)
    assert [suite.get("failures") for suite in junit] == ["0", "2", "0"]
    ran = vexport("repair", three_checkpoints[1], three_checkpoints[1].parent / "repaired")
    assert (ran.code, ran.errors[-1].startswith("error: internal error")) == (4, True)
