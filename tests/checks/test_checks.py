"""Good checkpoints have no findings. Faults of each kind are found at their place."""

import json
import math
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.architectures.families import save_family
from tests.command import findings, vexport
from tests.models import Good, errors, problems, quantize, save_qwen3
from tests.mutations.edits import (
    GROUP,
    INPUTS,
    Change,
    config,
    drop,
    fill_with,
    put,
    rename_all,
    set_first,
    spoiled,
)
from vexport.records import Json

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.2.mlp.down_proj"


def test_unquantized_checkpoints_are_clean(llama: Path, tmp_path: Path) -> None:
    """The only finding is a warning that nothing is quantized."""
    for folder in (llama, save_qwen3(tmp_path / "qwen")):
        assert [(each.check, each.severity) for each in problems(folder)] == [("config", "warning")]


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the same bits as float8_e8m0fnu, whose values vLLM would cast to integers."""
    return exponents.view(torch.float8_e8m0fnu)


def padded_words(packed: torch.Tensor) -> torch.Tensor:
    """Pad 3-bit words to the size in compressed-tensors before 0.18, with ten values per word."""
    columns = packed.shape[1] * 32 // 3
    return torch.nn.functional.pad(packed, (0, -(-columns // 10) - packed.shape[1]))


# Check and place of each error. The recorded mutations (tests/mutations) test that it is an error.
TENSOR_MUTATIONS = [
    ("W4A8", drop(f"{DOWN}.weight_scale"), "completeness", f"{DOWN}.weight_scale"),
    (
        "NVFP4A16",
        put(f"{Q}.weight_global_scale", lambda t: t * 1.25),
        "fusion",
        "layers.1.self_attn.qkv_proj: weight_global_scale",
    ),
    (
        "NVFP4",
        put(f"{DOWN}.weight_global_scale", lambda t: 1 / t),
        "values",
        f"{DOWN}.weight_global_scale",
    ),
    ("FP8_BLOCK", put(f"{DOWN}.weight_scale", lambda t: t[:-1]), "shapes", f"{DOWN}.weight_scale"),
    ("MXFP8", put(f"{DOWN}.weight_scale", e8m0), "shapes", f"{DOWN}.weight_scale"),
    ("W3A16", put(f"{DOWN}.weight_packed", padded_words), "shapes", DOWN),
]


@pytest.mark.parametrize(("scheme", "change", "check", "where"), TENSOR_MUTATIONS)
def test_broken_tensors_are_found(
    good: Good, tmp_path: Path, scheme: str, change: Change, check: str, where: str
) -> None:
    found = errors(spoiled(good(scheme), tmp_path / "broken", change))
    assert any(finding.check == check and where in finding.where for finding in found), found


@pytest.mark.parametrize(
    ("scheme", "change", "where"),
    [
        ("FP8_DYNAMIC", put(f"{DOWN}.weight", lambda t: t.to(torch.bfloat16)), f"{DOWN}.weight"),
        ("W4A16", drop(f"{DOWN}.weight_shape"), f"{DOWN}.weight_shape"),
        (
            "NVFP4",
            put(f"{DOWN}.weight_scale", lambda t: t.to(torch.bfloat16)),
            f"{DOWN}.weight_scale",
        ),
        (
            "NVFP4",
            put(f"{DOWN}.input_global_scale", lambda t: t.bfloat16()),
            f"{DOWN}.input_global_scale",
        ),
    ],
)
def test_lossless_cast_is_warning(
    good: Good, tmp_path: Path, scheme: str, change: Change, where: str
) -> None:
    found = problems(spoiled(good(scheme), tmp_path / "cast", change))
    assert [(finding.severity, finding.where) for finding in found] == [("warning", where)]


@pytest.mark.parametrize(
    ("scheme", "scale"), [("NVFP4", "input_global_scale"), ("FP8", "input_scale")]
)
def test_smaller_input_scale_is_warning(
    good: Good, tmp_path: Path, scheme: str, scale: str
) -> None:
    """vLLM uses the largest scale of the three fused layers.

    It is a warning if two layers have this scale, and an error if only one layer has it.
    """
    found = problems(
        spoiled(good(scheme), tmp_path / "smaller", put(f"{Q}.{scale}", lambda old: old / 3))
    )
    assert [(finding.severity, finding.check) for finding in found] == [("warning", "fusion")]
    found = problems(
        spoiled(good(scheme), tmp_path / "larger", put(f"{Q}.{scale}", lambda old: old * 3))
    )
    assert [(finding.severity, finding.check) for finding in found] == [("error", "fusion")]


@pytest.mark.parametrize(
    ("scheme", "change", "inputs"),
    [
        ("FP8", {"symmetric": False}, "float 8 bits tensor asymmetric"),
        ("FP8", {"type": "int"}, "int 8 bits tensor"),
        ("FP8_DYNAMIC", {"type": "int"}, "int 8 bits token dynamic"),
    ],
)
def test_unsupported_inputs_are_warning(
    good: Good, tmp_path: Path, scheme: str, change: dict[str, Json], inputs: str
) -> None:
    """vLLM keeps these inputs in 16 bits."""
    folder = spoiled(good(scheme), tmp_path / "changed", config(INPUTS, **change))
    (finding,) = [
        finding for finding in findings(folder, "--sm", "90") if finding["check"] == "config"
    ]
    assert (finding["severity"], finding["rule"]) == ("warning", "config/ignored-inputs")
    assert inputs in finding["got"]


@pytest.mark.parametrize(
    ("scheme", "change", "rule"),
    [
        ("NVFP4", put(f"{DOWN}.weight_scale", fill_with(1.0)), "values/equal-scales"),
        (
            "FP8_BLOCK",
            config((*GROUP, "weights"), actorder="group"),
            "config/unsupported-arguments",
        ),
        ("FP8", put(f"{DOWN}.weight_scale", fill_with(0.0)), "values/invalid-scale"),
        ("W4A16", put(f"{DOWN}.weight_scale", set_first(math.inf)), "values/invalid-scale"),
    ],
)
def test_fault_is_found_once(
    good: Good, tmp_path: Path, scheme: str, change: Change, rule: str
) -> None:
    (finding,) = errors(spoiled(good(scheme), tmp_path / "broken", change))
    assert finding.rule == rule


def test_misnamed_expert_is_found_once(tmp_path: Path) -> None:
    """Its tensors are named by the error, and not by warnings as well."""
    checkpoint = quantize(save_family("qwen3-moe", tmp_path / "model"), tmp_path / "out", "W4A16")
    rename_all(lambda name: name.replace("experts.0.down_proj", "experts.0.dn_proj"))(checkpoint)
    found = [each for each in problems(checkpoint) if "dn_proj" in each.where]
    assert [each.severity for each in found] == ["error"] * len({each.where for each in found})


def test_routed_experts_need_supported_inputs(tmp_path: Path) -> None:
    """vLLM's get_moe_method has no method for experts with inputs in 16 bits."""
    checkpoint = quantize(
        save_family("qwen3-moe", tmp_path / "model"), tmp_path / "out", "FP8_DYNAMIC"
    )
    assert errors(checkpoint) == []
    config(INPUTS, type="int")(checkpoint)
    (finding,) = [each for each in errors(checkpoint) if each.check == "config"]
    assert finding.rule == "config/expert-arguments"


def test_index_outside_folder_is_refused(good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    copytree(good("W8A8"), folder)
    for name in ("../model.safetensors", "/etc/passwd", "missing.safetensors"):
        index = {"metadata": {}, "weight_map": {"a": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (finding,) = errors(folder)
        assert finding.check == "files"
        assert name.rpartition("/")[2] in f"{finding.where} {finding.got}"


def test_check_reports_and_exit_codes(good: Good, tmp_path: Path) -> None:
    broken = spoiled(good("W8A8"), tmp_path / "broken", drop(f"{DOWN}.weight_scale"))
    ran = vexport("check", good("NVFP4"), broken, "--format", "json")
    assert ran.code == 1
    assert len(ran.errors) == 1
    reports = json.loads(ran.stdout)
    assert [report["checkpoint"] for report in reports] == [str(good("NVFP4")), str(broken)]
    assert [report["ok"] for report in reports] == [True, False]
    assert set(reports[1]["findings"][0]) == {
        "rule",
        "check",
        "claim",
        "severity",
        "where",
        "expected",
        "got",
        "fix",
        "places",
    }
    assert vexport("check", good("NVFP4"), "--format", "json").code == 0
