"""Rounding with text in all supported families: experts, heads, multimodal models."""

import json
from pathlib import Path
from shutil import copyfile, copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from tests.architectures.families import save_family
from tests.calibration.models import LLAMA_LIKE, configs, expert_configs, save
from tests.command import vexport
from tests.models import write_calibration
from tests.mutations.edits import Tensors, copy_prefix, tensors
from tests.quantize import plain_experts
from vexport.calibration import calibrate, read_samples
from vexport.calibration.attention import causal_attention
from vexport.calibration.inputs import GroupInputs
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import as_loaded, weight_of
from vexport.fidelity.source import ComparedSource
from vexport.formats.plan import Plan
from vexport.names import Folder
from vexport.numerics.metrics import kl_divergence
from vexport.plan.build import PlanSettings
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import CalibrationData, KvCache
from vexport.records.calibration import Rounding, RoundingReport
from vexport.scenario import Calibration, Rule

SCHEME = "MXFP4A16"
WRAPPED = ("gemma3-vision", "qwen2.5-vl")
CONFIGS = {**configs(), **expert_configs()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_calibration(tmp_path / "text.jsonl", length=24, vocabulary=100)


def rounded(
    source: Path,
    out: Path,
    text: Path,
    rounding: Rounding,
    scheme: str = SCHEME,
    *,
    head: bool = False,
    kv_cache: KvCache | None = None,
) -> tuple[Plan, RoundingReport | None]:
    """Quantize all linear layers. With `head`, quantize the output head too."""
    rules = tuple(
        Rule(match=match, scheme=scheme, observer="memoryless_minmax", rounding=rounding)
        for match in (("lm_head", "Linear") if head else ("Linear",))
    )
    job = QuantizeJob(
        source=Folder.at(source),
        out=out,
        rules=rules,
        planning=PlanSettings(on_unsupported_shape="keep", kv_cache=kv_cache),
        calibration=Calibration(data=str(text)),
        trust_remote_code=True,
    )
    plan, _, report = quantize_source(job)
    if report is not None:
        assert {group.name for group in report.groups} == {group.name for group in plan.groups}
    return plan, report


FAMILIES = {
    "mixtral": (False, "MXFP4", "layers.1.block_sparse_moe.experts.7.w2"),
    "qwen3_moe": (True, "NVFP4", "layers.1.mlp.experts.0.w13"),
    "llama4": (True, "MXFP4", "layers.0.feed_forward.experts.3.down_proj"),
    "deepseek_v3": (False, "W8A8", "layers.0.self_attn.fused_qkv_a_proj"),
    "qwen3_next": (False, "W8A8", "layers.0.linear_attn.in_proj_qkvz"),
    "gpt2": (False, "MXFP4A16", "transformer.h.2.mlp.c_proj"),
    "qwen3": (False, "MXFP4", "lm_head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_groups_are_rounded(family: str, text: Path, tmp_path: Path) -> None:
    stacked, scheme, present = FAMILIES[family]
    source = save(CONFIGS[family], tmp_path / family, stacked=stacked)
    _, report = rounded(source, tmp_path / "out", text, "gptq", scheme, head=family == "qwen3")
    assert report is not None
    assert any(group.name.endswith(present) for group in report.groups)
    reached = [group for group in report.groups if group.tokens]
    assert len(reached) >= 0.9 * len(report.groups)
    assert {group.fallback for group in reached} == {None}
    assert {group.fallback for group in report.groups if not group.tokens} <= {
        "no calibration token reaches it"
    }
    better = [group.error < group.nearest_error for group in reached]
    assert sum(better) > 0.95 * len(better)


def dequantized(source: Path, checkpoint: Path, out: Path) -> Path:
    """Save the source with a checkpoint's weights, which compressed-tensors dequantizes."""
    copytree(source, out)
    values = load_file(source / "model.safetensors")
    with Reader() as reader:
        view, linears = (
            CheckpointView(read_index(checkpoint), reader),
            ComparedSource(read_index(source), reader).linears,
        )
        for layer in view.layers.by_name.values():
            stored = as_loaded(view, layer) if layer.is_quantized else None
            if layer.group is not None and stored is not None:
                linear, weight = linears[layer.name], weight_of(layer.group, stored)
                assert linear.part is None
                values[linear.weight] = weight.to(torch.bfloat16)
    save_file(values, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_kv_cache_is_calibrated_with_quantized_weights(text: Path, tmp_path: Path) -> None:
    """Ranges equal those of a model with the dequantized weights, and differ from the source's."""
    source = save(CONFIGS["llama"], tmp_path / "llama")
    plan, report = rounded(source, tmp_path / "out", text, "gptq", kv_cache="fp8")
    assert report is not None
    rows = read_samples(
        CalibrationData(name=str(text), samples=8, seq_len=24), source, vocab_size=100
    )
    copy = dequantized(source, tmp_path / "out", tmp_path / "copy")
    with causal_attention("cpu"):
        exact, quantized = (
            calibrate(LayerWalk(read_index(folder)), plan, rows).kv_ranges
            for folder in (source, copy)
        )
    assert len(quantized) == 3
    assert report.cached == quantized
    assert report.cached != exact


def _save_family(folder: Path, name: str) -> None:
    generator = torch.Generator().manual_seed(0)

    @tensors
    def spread(values: Tensors) -> None:
        for value in values.values():
            if value.dim() > 1:
                value.normal_(0.0, 0.05, generator=generator)

    spread(save_family(name, folder))


def _save_plain_experts(folder: Path) -> None:
    sizes = {**LLAMA_LIKE, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 16}
    config = MixtralConfig(**sizes, num_experts_per_tok=2)
    model = plain_experts.PlainMixtral(config).to(torch.bfloat16)
    config.architectures = ["MixtralForCausalLM"]
    config.auto_map = {"AutoModelForCausalLM": "plain_experts.PlainMixtral"}
    config.save_pretrained(folder)
    copyfile(plain_experts.__file__, folder / "plain_experts.py")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2)
    values = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def _save_tied(folder: Path) -> None:
    """Save a model that is tied by its config. Its file contains the head, as in some exports."""
    save(
        Qwen3Config(
            **{**LLAMA_LIKE, "num_hidden_layers": 2}, head_dim=16, tie_word_embeddings=True
        ),
        folder,
    )
    copy_prefix("model.embed_tokens.weight", "lm_head.weight")(folder)


def save_model(folder: Path, name: str) -> Path:
    if name in WRAPPED:
        _save_family(folder, name)
    elif name in CONFIGS:
        save(CONFIGS[name], folder)
    else:
        folder.mkdir()
        (_save_plain_experts if name == "plain" else _save_tied)(folder)
    return folder


def logprobs(folder: Path, text: Path, *, wrapped: bool) -> torch.Tensor:
    kind = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=True)
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    with torch.inference_mode():
        logits = torch.cat([model(input_ids=torch.tensor([row])).logits[0].float() for row in rows])
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("biases", [False, True])
def test_refit_uses_outputs_before_they_change(
    biases: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refit with the source's outputs leaves the errors of a refit with the source's inputs.

    Llama 4 adds other values to the output of a down projection, in place. With biases, a refit
    uses the inputs.
    """
    config = CONFIGS["llama4"]
    if biases:
        config = LlamaConfig(**LLAMA_LIKE, attention_bias=True, mlp_bias=True)
    source = save(config, tmp_path / "source")
    errors = []
    for name in ("outputs", "inputs"):
        _, report = rounded(source, tmp_path / name, text, "refit")
        assert report is not None
        down = [group for group in report.groups if group.name.endswith("down_proj")]
        errors.append([group.error for group in down if "experts" not in group.name])
        monkeypatch.setattr(GroupInputs, "_few_outputs", lambda *args: 0)
    assert errors[0]
    assert (errors[0] == errors[1]) == biases
    assert errors[0] == pytest.approx(errors[1], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRAPPED, "plain", "phi3", "tied", "qwen3_moe"])
def test_refit_is_closer_than_nearest(name: str, text: Path, tmp_path: Path) -> None:
    """The comparison with the source finds no error."""
    source, wrapped = save_model(tmp_path / "source", name), name in WRAPPED
    exact, divergence = logprobs(source, text, wrapped=wrapped), list[float]()
    ways: tuple[Rounding, Rounding] = ("nearest", "refit")
    for rounding in ways:
        out = tmp_path / rounding
        plan, report = rounded(source, out, text, rounding, head=name == "tied")
        assert report is None or not report.fallbacks
        assert not [group for group in plan.groups if "vision" in group.name]
        assert ("lm_head" in {group.name for group in plan.groups}) == (name == "tied")
        ran = vexport("check", out, "--source", source, "--format", "json", "--quiet")
        (checked,) = json.loads(ran.stdout)
        assert not [
            finding
            for finding in checked["findings"]
            if (finding["check"], finding["severity"]) == ("source", "error")
        ]
        copy = dequantized(source, out, tmp_path / f"{rounding}-copy")
        divergence.append(float(kl_divergence(exact, logprobs(copy, text, wrapped=wrapped)).mean()))
    assert divergence[1] < 0.9 * divergence[0]
