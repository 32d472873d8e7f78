"""`vexport check --tp --sm --vllm`: what runs where, and what other versions of vLLM do otherwise."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.command import vexport
from tests.engine.sketches import LLAMA, QWEN3_MOE, sketch
from tests.mutations.edits import ARGUMENTS, Change, Tensors, all_of, config, spoiled, tensors
from vexport.checks import check_checkpoint
from vexport.checks.vllm.target import Target

Finding = Mapping[str, str]


def findings(checkpoint: Path, *options: object) -> list[Finding]:
    """What is said for the devices and the version."""
    ran = vexport("check", checkpoint, "--format", "json", *options)
    assert ran.stdout, ran.stderr
    (report,) = json.loads(ran.stdout)
    assert ran.code == (0 if report["ok"] else 1)
    return [finding for finding in report["findings"] if finding["check"] in ("devices", "versions")]


def errors(found: list[Finding]) -> list[str]:
    return [finding["where"] for finding in found if finding["severity"] == "error"]


@pytest.mark.parametrize(
    ("changes", "preset", "tp", "words"),
    [
        ({"intermediate_size": 384}, "W4A16", 2, "in_features 192 is not a multiple of group size 128"),
        ({"intermediate_size": 336}, "NVFP4A16", 2, "in_features 168 is not a multiple of group size 16"),
        ({"intermediate_size": 510}, "FP8_DYNAMIC", 4, "out_features 510 is not a multiple of 4 ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 192},
            "FP8_DYNAMIC",
            4,
            "6 attention",
        ),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 192},
            "FP8_DYNAMIC",
            2,
            "3 key and",
        ),
    ],
)
def test_what_ranks_cut_is_found(
    tmp_path: Path, changes: Mapping[str, object], preset: str, tp: int, words: str
) -> None:
    checkpoint = sketch(tmp_path / "sketch", {**LLAMA, **changes}, preset, {})
    found = findings(checkpoint, "--tp", f"1,{tp}")
    assert all(f"tp {tp})" in where for where in errors(found))
    assert words in {finding["got"][: len(words)] for finding in found}
    assert errors(findings(checkpoint, "--tp", 1)) == []


@pytest.mark.parametrize(("vllm", "refused"), [("0.22", True), ("0.23", False)])
def test_ordering_of_rows_is_what_an_older_validator_refuses(
    good: Callable[[str], Path], tmp_path: Path, vllm: str, refused: bool
) -> None:
    change = config(ARGUMENTS, strategy="channel", group_size=None, actorder="static")
    found = findings(spoiled(good("W4A16"), tmp_path / "rows", change), "--vllm", vllm)
    assert any("compressed-tensors 0.15" in finding["got"] for finding in found) is refused


def test_key_heads_fewer_than_ranks_are_repeated(tmp_path: Path) -> None:
    checkpoint = sketch(tmp_path / "sketch", {**LLAMA, "num_key_value_heads": 2}, "FP8_DYNAMIC", {})
    assert findings(checkpoint, "--tp", "1,2,4,8") == []


def test_routed_experts_are_cut_by_their_own_size(tmp_path: Path) -> None:
    checkpoint = sketch(tmp_path / "sketch", QWEN3_MOE, "W4A16", {})
    assert errors(findings(checkpoint, "--tp", 2)) == []
    assert any("experts.*.down_proj" in where for where in errors(findings(checkpoint, "--tp", 4)))


# scheme: capabilities that refuse it, and those that run it in another precision with that precision.
GRID: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "NVFP4": ("70", {"75/80/89/90": "W4A16"}),
    "NVFP4A16": ("70", {}),
    "MXFP4": ("70/75", {"80/89/90": "W4A16"}),
    "MXFP4A16": ("70/75", {"100": "W4A4"}),
    "MXFP4XFP8": ("70/75", {"80/89/90": "W4A16", "100": "W4A4"}),
    "MXFP8": ("70", {"75/80/89/90": "W8A16"}),
    "FP8_DYNAMIC": ("70", {"75/80": "W8A16"}),
    "FP8_BLOCK": ("70", {"75/80/89": "W8A16"}),
    "W8A8": ("70/100", {}),
    "W4A8": ("70", {"75/80/89/90/100": "W4A16"}),
    "W4AFP8": ("70/75/80/89/100", {}),
    "W4A16": ("70", {}),
    "W3A16": ("70", {"75/80/89/90/100": "3 bits"}),
}


@pytest.mark.parametrize("scheme", GRID)
def test_capabilities_refuse_or_run_otherwise(good: Callable[[str], Path], scheme: str) -> None:
    """What vLLM 0.32's dry load said of the same schemes; tests/engine/test_dry_agrees.py asks it again."""
    refused, other = GRID[scheme]
    found = findings(good(scheme), "--sm", "70,75,80,89,90,100")
    assert [where.partition("sm ")[2] for where in errors(found)] == [f"{refused})"]
    warnings = {one["where"].partition("sm ")[2]: one["got"] for one in found if one["severity"] == "warning"}
    assert warnings.keys() == {f"{capabilities})" for capabilities in other}
    assert all(warnings[f"{capabilities})"].startswith(bits) for capabilities, bits in other.items())


def ordered(values: Tensors) -> None:
    """The index by which columns were ordered, for every packed weight."""
    for name in [name for name in values if name.endswith(".weight_packed")]:
        columns = values[name].shape[1] * 8
        values[name.replace("packed", "g_idx")] = torch.arange(columns, dtype=torch.int32) // 128


@pytest.mark.parametrize(
    ("scheme", "change", "versions"),
    [
        ("W3A16", config((), max_position_embeddings=256), {"0.24": "error", "0.25": ""}),
        ("W2A16", config((), max_position_embeddings=256), {"0.22": "error", "0.24": ""}),
        ("W4A8", config((), max_position_embeddings=256), {"0.25": "error", "0.26": ""}),
        ("MXFP4", config((), max_position_embeddings=256), {"0.21": "warning", "0.22": "", "0.32": ""}),
        ("NVFP4", config((), max_position_embeddings=256), {"0.28": "", "0.31.1": ""}),
        ("W4A16", config((), architectures=["GraniteSWAForCausalLM"]), {"0.28": "error", "0.29": ""}),
    ],
)
def test_versions_differ_where_they_are_known_to(
    good: Callable[[str], Path], tmp_path: Path, scheme: str, change: Change, versions: Mapping[str, str]
) -> None:
    checkpoint = spoiled(good(scheme), tmp_path / "checkpoint", change)
    for version, severity in versions.items():
        found = [
            one["severity"] for one in findings(checkpoint, "--vllm", version) if one["severity"] != "info"
        ]
        assert found == ([severity] if severity else []), version


def test_activation_ordering_ends_with_a_version(good: Callable[[str], Path], tmp_path: Path) -> None:
    change = all_of(config(ARGUMENTS, actorder="dynamic"), tensors(ordered))
    checkpoint = str(spoiled(good("W4A16"), tmp_path / "checkpoint", change))
    assert check_checkpoint(checkpoint, Target(vllm=(0, 29))).ok
    (refused, *_) = check_checkpoint(checkpoint, Target(vllm=(0, 30))).findings
    assert (refused.check, refused.got) == ("config", "actorder dynamic")
    without = str(spoiled(good("W4A16"), tmp_path / "without", config(ARGUMENTS, actorder="group")))
    found = check_checkpoint(without, Target(vllm=(0, 28))).findings
    missing = [one for one in found if one.check not in ("versions", "tokenizer")]
    assert missing
    assert all(one.where.endswith(".weight_g_idx") for one in missing)


def test_what_is_not_known_of_a_version_is_said(good: Callable[[str], Path]) -> None:
    (newer,) = findings(good("W8A8"), "--vllm", "0.40")
    assert (newer["severity"], newer["got"]) == ("warning", "unknown: checked by the rules of 0.33")
    assert findings(good("W8A8"), "--vllm", "0.24") == []
    (older,) = findings(good("W8A8"), "--vllm", "0.19")
    assert older["got"] == "unknown: checked by the rules of 0.20"
    ran = vexport("check", good("W8A8"), "--vllm", "newest")
    assert (ran.code, "is not a version like 0.30" in ran.errors[0]) == (2, True)
