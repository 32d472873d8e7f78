"""A wrong word of a config group is one finding, which names the word, and repair corrects it."""

import json
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import Good, problems
from tests.mutations.edits import ARGUMENTS, GROUP, all_of, config, drop_if, put, spoiled
from vexport.checks import check_checkpoint
from vexport.records import Json

INPUTS = (*GROUP, "input_activations")


@pytest.mark.parametrize(
    ("scheme", "place", "key", "wrong"),
    [
        ("W8A8", ARGUMENTS, "type", "float"),
        ("FP8_DYNAMIC", ARGUMENTS, "strategy", "tensor"),
        ("NVFP4A16", ARGUMENTS, "group_size", 32),
        ("W4A16_ASYM", ARGUMENTS, "symmetric", True),
        ("W4A16", GROUP, "format", "int-quantized"),
        ("FP8", INPUTS, "dynamic", True),
    ],
)
def test_wrong_word_is_one_finding(
    good: Good, tmp_path: Path, scheme: str, place: tuple[str, ...], key: str, wrong: Json
) -> None:
    broken = spoiled(good(scheme), tmp_path / "broken", config(place, **{key: wrong}))
    (report,) = json.loads(vexport("check", broken, "--static", "--format", "json").stdout)
    (finding,) = [each for each in report["findings"] if each["severity"] == "error"]
    assert finding["where"].endswith(f".{key}")
    assert len(finding["places"]) >= 21  # each layer of the model
    assert finding["got"].startswith(json.dumps(wrong))
    ran = vexport("repair", broken, tmp_path / "out", "--quiet", "--format", "json")
    assert ran.code == 0
    assert len(json.loads(ran.stdout)["repairs"]) == 1
    assert problems(tmp_path / "out") == []


def test_fault_of_one_layer_is_not_blamed_on_config(good: Good, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    broken = spoiled(good("FP8_DYNAMIC"), tmp_path / "broken", put(name, lambda t: t.float()))
    places = [each.where for each in check_checkpoint(str(broken)).findings if each.claim]
    assert places == [name]


def test_tensors_that_no_word_explains_share_findings(good: Good, tmp_path: Path) -> None:
    """Without all scales, no other value of a word fits."""
    lost = drop_if(lambda name: name.endswith("weight_scale"))
    broken = spoiled(good("W8A8"), tmp_path / "broken", all_of(lost))
    (report,) = json.loads(vexport("check", broken, "--static", "--format", "json").stdout)
    (finding,) = [each for each in report["findings"] if each["severity"] == "error"]
    assert finding["check"] == "completeness"
    assert len(finding["places"]) == 21
    assert finding["where"] == f"{finding['places'][0]} and 20 more"


def test_lost_tensors_are_not_blamed_on_config(good: Good, tmp_path: Path) -> None:
    """The config may be right, and the zero points lost."""
    broken = spoiled(good("W4A16"), tmp_path / "broken", config(ARGUMENTS, symmetric=False))
    found = check_checkpoint(str(broken)).findings
    assert {each.check for each in found if each.severity == "error"} == {"completeness"}


def test_ranks_share_finding(good: Good) -> None:
    (report,) = json.loads(
        vexport("check", good("W4A16"), "--static", "--tp", "8,16", "--format", "json").stdout
    )
    kinds = [each["where"].partition(" (")[0] for each in report["findings"] if each["claim"]]
    assert len(kinds) == len(set(kinds))
