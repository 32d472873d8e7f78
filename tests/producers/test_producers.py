"""Checkpoints of AutoRound and of llm-compressor's calibrated path.

They have features that vexport never writes. AutoRound writes scales of either sign, and targets
that include the output head. llm-compressor writes rotations of the running model, groups for
attention, and configs without a group.
"""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.command import vexport
from tests.models import WORDS, problems, write_tokenizer
from tests.mutations.edits import (
    QUANTIZATION,
    Change,
    add,
    all_of,
    config,
    drop,
    json_config,
    node,
    put,
    spoiled,
)
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.engine.dry.load import DryLoad
from vexport.engine.reference import reference_logprobs
from vexport.records import Json

CHECKPOINTS = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
EXPERTS_OF_INT4 = "autoround-moe-W4A16"
SIGNED = ("autoround-llama-W4A16", "autoround-llama-INT8_W8A8", EXPERTS_OF_INT4)
ROTATED = "llmcompressor-llama-QUIP"
# Checkpoints that no other test runs in the real vLLM. Its CPU build needs AMX for INT4 experts.
RUN_IN_VLLM = (EXPERTS_OF_INT4 if torch.cpu._is_amx_tile_supported() else SIGNED[0], ROTATED)
SOURCE = Path(__file__).parent.parent / "peer" / "llama"
# Mean KL from the source, with random weights and tokens. A reference that misses a rotation or a
# scale has a KL of 1.
QUANTIZATION_KL = 0.1
VOCABULARY = 64
Q = "model.layers.0.self_attn.q_proj"
TRANSFORM = (*QUANTIZATION, "transform_config", "config_groups", "v")
EXPERTS = (*QUANTIZATION, "config_groups", "group_0")
# llm-compressor stores a negative scale of queries.
SUSPECT = {"llmcompressor-llama-ATTENTION": {("warning", "kv_cache/invalid-scale")}}
FP8: dict[str, Json] = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
INT8: dict[str, Json] = {**FP8, "type": "int"}


@pytest.mark.parametrize("name", NAMES)
def test_sound_checkpoints_need_no_repair(name: str, tmp_path: Path) -> None:
    found = {(finding.severity, finding.rule) for finding in problems(CHECKPOINTS / name)}
    assert found == SUSPECT.get(name, set())
    ran = vexport("repair", CHECKPOINTS / name, tmp_path / "out", "--format", "json", "--quiet")
    assert (ran.code, json.loads(ran.stdout)["repairs"]) == (0, [])


@pytest.mark.parametrize("name", [name for name in NAMES if "-llama-" in name])
def test_reference_is_near_source(name: str) -> None:
    prompts = [
        torch.randint(3, VOCABULARY, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    source = reference_logprobs(SOURCE, prompts)
    quantized = reference_logprobs(CHECKPOINTS / name, prompts)
    divergence = (source.exp() * (source - quantized)).sum(dim=-1).mean()
    assert float(divergence) < QUANTIZATION_KL


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_IN_VLLM)
def test_vllm_agrees_with_reference(name: str, tmp_path: Path) -> None:
    checkpoint = copytree(CHECKPOINTS / name, tmp_path / name)
    write_tokenizer(checkpoint, WORDS[: VOCABULARY - 4])
    ran = vexport("load", checkpoint, "--mode", "eager", "--format", "json", "--quiet")
    report = json.loads(ran.stdout)[0]
    assert ran.code == 0, report["findings"]
    assert 0 < report["logprobs"]["mean_kl"] <= report["logprobs"]["limit"]


@pytest.mark.parametrize("name", SIGNED[:2])
@pytest.mark.parametrize("count", [1, None])
def test_wrong_signs_are_found(name: str, count: int | None, tmp_path: Path) -> None:
    """One negative scale, or only negative scales, are an error."""

    def turned(scale: torch.Tensor) -> torch.Tensor:
        flat = scale.abs().flatten()
        flat[:count] *= -1
        return flat.reshape(scale.shape)

    bad = spoiled(CHECKPOINTS / name, tmp_path / "bad", put(f"{Q}.weight_scale", turned))
    assert [(finding.check, finding.where) for finding in problems(bad)] == [
        ("values", f"{Q}.weight_scale")
    ]


def rotation(**changes: Json) -> Change:
    def change(whole: dict[str, Json]) -> None:
        applied = node(whole, TRANSFORM)["apply"]
        assert isinstance(applied, list)
        assert isinstance(applied[0], dict)
        applied[0].update(changes)

    return json_config(change)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (drop(f"{Q}.v_input.weight"), "v_input.weight"),
        (rotation(location="k_cache"), "transform_config.v"),
        (rotation(targets=[Q]), "self_attn.qkv_proj"),
        (add(f"{Q}.bias", torch.zeros(128, dtype=torch.bfloat16)), "self_attn.qkv_proj"),
    ],
    ids=["no matrix", "of attention", "of one fused layer", "with a bias"],
)
def test_unsupported_rotations_are_found(change: Change, where: str, tmp_path: Path) -> None:
    report = check_checkpoint(str(spoiled(CHECKPOINTS / ROTATED, tmp_path / "bad", change)))
    assert not report.ok
    assert any(
        finding.check == "transforms" and finding.where.endswith(where)
        for finding in report.findings
    )


def test_rotations_run_on_one_rank_only() -> None:
    report = check_checkpoint(str(CHECKPOINTS / ROTATED), Target(tp=(1, 2)))
    refused = [
        finding.where.rpartition(" (")[2]
        for finding in report.findings
        if finding.check == "transforms"
    ]
    assert refused == ["tp 2)"]


def expert_scheme(
    numbers: dict[str, Json], weights: str, inputs: str | None, *, dynamic: bool = False
) -> Change:
    """Change the scheme of the routed experts. vLLM refuses it before it reads a tensor."""
    format_ = f"{numbers['type']}-quantized"
    activations: Json = {**numbers, "strategy": inputs, "dynamic": dynamic} if inputs else None
    group = {
        "weights": {**numbers, "strategy": weights},
        "input_activations": activations,
        "format": format_,
    }
    return all_of(config(EXPERTS, **group), config(QUANTIZATION, format=format_))


REFUSED = {
    "static inputs": expert_scheme(FP8, "channel", "tensor"),
    "FP8 without inputs": expert_scheme(FP8, "tensor", None),
    "one INT8 scale": expert_scheme(INT8, "tensor", "token", dynamic=True),
    "static INT8 inputs": expert_scheme(INT8, "channel", "tensor"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_unsupported_expert_schemes_are_found(change: Change, tmp_path: Path) -> None:
    report = check_checkpoint(
        str(spoiled(CHECKPOINTS / "autoround-moe-W4A16", tmp_path / "bad", change))
    )
    assert any(
        finding.check == "config" and "routed experts" in finding.got for finding in report.findings
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_agrees_on_checkpoints_and_schemes(tmp_path: Path) -> None:
    """vLLM loads the producers' checkpoints and refuses the unsupported schemes of experts."""
    source = CHECKPOINTS / EXPERTS_OF_INT4
    bad = [spoiled(source, tmp_path / name, change) for name, change in REFUSED.items()]
    checkpoints = [*(CHECKPOINTS / name for name in NAMES), *bad]
    reports = DryLoad(checkpoints=checkpoints, tp=(1,), sm=(90,)).reports()
    assert [report.ok for report in reports[: len(NAMES)]] == [True] * len(NAMES)
    refused = reports[len(NAMES) :]
    assert [cell.status for report in refused for cell in report.cells] == ["refused"] * len(bad)
    assert "assert self.weight_quant.strategy" in refused[0].findings[0].got
