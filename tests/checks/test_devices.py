"""`vexport check --tp --sm --vllm`: GPUs, ranks, and other versions of vLLM."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architectures.families import save_family
from tests.command import findings, vexport
from tests.models import Good, quantize, save_llama, save_w4a8_in_bytes
from tests.mutations.edits import config, spoiled

SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 192}


def device_findings(checkpoint: Path, *options: object) -> list[dict[str, str]]:
    """Return the findings about devices and versions."""
    return [
        finding
        for finding in findings(checkpoint, *options)
        if finding["check"] in ("devices", "versions")
    ]


def errors(found: list[dict[str, str]]) -> list[str]:
    return [finding["where"] for finding in found if finding["severity"] == "error"]


@pytest.mark.parametrize(
    ("changes", "preset", "tp", "pattern"),
    [
        ({"intermediate_size": 384}, "W4A16", 2, "in_features 192 .*group size 128"),
        ({"intermediate_size": 336}, "NVFP4A16", 2, "in_features 168 .*group size 16"),
        ({"intermediate_size": 510}, "FP8_DYNAMIC", 4, "out_features 510 .*4 ranks"),
        ({**SIX_HEADS, "num_key_value_heads": 6}, "FP8_DYNAMIC", 4, "6 attention heads"),
        ({**SIX_HEADS, "num_key_value_heads": 3}, "FP8_DYNAMIC", 2, "3 key and"),
    ],
)
def test_indivisible_ranks_are_found(
    tmp_path: Path, changes: Mapping[str, object], preset: str, tp: int, pattern: str
) -> None:
    checkpoint = quantize(save_llama(tmp_path / "model", **changes), tmp_path / "out", preset)
    found = device_findings(checkpoint, "--tp", f"1,{tp}")
    assert all(f"tp {tp})" in where for where in errors(found))
    matching = [finding for finding in found if re.match(rf"{pattern}\b", finding["got"])]
    assert matching
    rules = {finding["rule"] for finding in matching}
    assert rules in ({"devices/layer-on-ranks"}, {"devices/heads"})
    assert errors(device_findings(checkpoint, "--tp", 1)) == []


def test_key_heads_repeat_and_experts_split(good: Good, tmp_path: Path) -> None:
    assert device_findings(good("FP8_DYNAMIC"), "--tp", "1,2,4") == []
    source = save_family("qwen3-moe", tmp_path / "model", moe_intermediate_size=256)
    checkpoint = quantize(source, tmp_path / "out", "W4A16")
    assert errors(device_findings(checkpoint, "--tp", 2)) == []
    assert any(
        "experts.*.down_proj" in where for where in errors(device_findings(checkpoint, "--tp", 4))
    )


# For each scheme: capabilities on which vLLM refuses it, and the precision on capabilities on which
# vLLM runs it in another precision. `LOWER` are the schemes whose inputs vLLM rounds to fewer bits
# than stored.
LOWER = ("MXFP8A16",)
CAPABILITIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "NVFP4": ("70", {"75/80/89/90": "W4A16"}),
    "NVFP4A16": ("70", {}),
    "MXFP4": ("70/75", {"80/89": "W4A16", "90": "W4A8"}),
    "MXFP4A16": ("70/75", {}),  # the inputs are a known fault of vLLM
    "MXFP4XFP8": ("70/75", {}),
    "MXFP8": ("70", {"75/80/89/90": "W8A16"}),
    "MXFP8A16": ("70", {"100": "W8A8"}),
    "FP8_DYNAMIC": ("70", {"75/80": "W8A16"}),
    "FP8_BLOCK": ("70", {"75/80/89": "W8A16"}),
    "W8A8": ("70/100", {}),
    "W4A8": ("70", {"75/80/89/90/100": "W4A16"}),
    "W4AFP8": ("70/75/80/89/100", {}),
    "W4A16": ("70", {}),
    "W3A16": ("70", {}),
}


@pytest.mark.parametrize("scheme", CAPABILITIES)
def test_precision_by_capability(good: Good, scheme: str) -> None:
    """The table is from vLLM 0.32's dry load, which tests/engine/test_dry_load.py repeats."""
    refused, other = CAPABILITIES[scheme]
    found = device_findings(good(scheme), "--sm", "70,75,80,89,90,100")
    assert [where.partition("sm ")[2] for where in errors(found)] == [f"{refused})"]
    running = [finding for finding in found if finding["severity"] != "error"]
    assert {finding["severity"] for finding in running} <= {
        "warning" if scheme in LOWER else "info"
    }
    precisions = {
        finding["where"].partition("(sm ")[2]: finding["got"].partition(" ")[0]
        for finding in running
    }
    assert precisions == {f"{capabilities})": bits for capabilities, bits in other.items()}


def test_lower_precisions_are_shown_apart(good: Good) -> None:
    """Two GPUs that round the inputs to different widths are two findings in text, too."""
    ran = vexport("check", good("MXFP4A16"), "--static", "--sm", "90,100")
    assert "HummingMxFp4LinearKernel of vLLM 0.32 on SM 90" in ran.stdout
    assert "FlashInferMxFp4LinearKernel of vLLM 0.32 on SM 100" in ran.stdout


def test_unpacked_w4a8_is_warning(llama: Path, tmp_path: Path) -> None:
    """llm-compressor stores W4A8 with one code per byte, which vLLM's GPU kernel cannot read."""
    checkpoint = save_w4a8_in_bytes(llama, tmp_path / "in bytes")
    assert errors(device_findings(checkpoint)) == []
    (found,) = device_findings(checkpoint, "--sm", "80,90,100")
    # vLLM's loaders accept it.
    assert (found["severity"], found["rule"]) == ("warning", "devices/kernel")
    assert "sm 80/90/100)" in found["where"]


@pytest.mark.parametrize(
    ("scheme", "version", "severities"),
    [
        ("W4A16", "0.30", []),
        ("W4A16", "0.31.1", []),
        ("MXFP4XFP8", "0.30", ["warning"]),
        ("MXFP4XFP8", "0.32", []),
    ],
)
def test_findings_by_version(
    good: Good, tmp_path: Path, scheme: str, version: str, severities: list[str]
) -> None:
    checkpoint = spoiled(
        good(scheme), tmp_path / "checkpoint", config((), max_position_embeddings=256)
    )
    found = [finding["severity"] for finding in device_findings(checkpoint, "--vllm", version)]
    assert [severity for severity in found if severity != "info"] == severities


def test_unknown_version_is_warning(good: Good) -> None:
    (newer,) = device_findings(good("W8A8"), "--vllm", "0.40")
    assert (newer["severity"], newer["rule"]) == ("warning", "versions/unknown-version")
    assert newer["where"] == "vLLM 0.40"
    assert "rules of vLLM 0.33" in newer["got"]
    assert device_findings(good("W8A8"), "--vllm", "0.31") == []
    (older,) = device_findings(good("W8A8"), "--vllm", "0.19")
    assert "rules of vLLM 0.30" in older["got"]
    ran = vexport("check", good("W8A8"), "--vllm", "newest")
    assert (ran.code, "is not a version such as 0.30" in ran.errors[0]) == (2, True)
