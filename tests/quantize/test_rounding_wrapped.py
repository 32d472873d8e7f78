"""Models in other wrappings are rounded by text: multimodal ones, lists of experts, tensors fused on disk."""

import json
from pathlib import Path
from shutil import copyfile, copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    Qwen3Config,
)

from tests.architectures.families import save_family
from tests.calibration.models import LLAMA_LIKE, configs, expert_configs, save
from tests.command import vexport
from tests.models import write_calibration
from tests.mutations.edits import Tensors, copied, tensors
from tests.quantize import plain_experts
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import as_loaded, weight_of
from vexport.fidelity.source import ComparedSource
from vexport.numerics.metrics import kl_divergence
from vexport.plan.source import rules_for
from vexport.quantize.job import QuantizeJob, quantize_source
from vexport.records import PlanRequest
from vexport.scenario import Calibration, Rule

SCHEME = "MXFP4A16"
WRAPPED = ("gemma3-vision", "qwen2.5-vl")


def _wrapped(folder: Path, name: str) -> None:
    generator = torch.Generator().manual_seed(0)

    @tensors
    def spread(values: Tensors) -> None:
        for value in values.values():
            if value.dim() > 1:
                value.normal_(0.0, 0.05, generator=generator)

    spread(save_family(name, folder))


def _plain(folder: Path) -> None:
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


def _tied(folder: Path) -> None:
    """Tied by its config; the head's own copy is in the file, as some exports leave it."""
    save(Qwen3Config(**{**LLAMA_LIKE, "num_hidden_layers": 2}, head_dim=16, tie_word_embeddings=True), folder)
    copied("model.embed_tokens.weight", "lm_head.weight")(folder)


def made(folder: Path, name: str) -> Path:
    if name in WRAPPED:
        _wrapped(folder, name)
    elif name in ("phi3", "qwen3_moe"):
        save({**configs(), **expert_configs()}[name], folder)
    else:
        folder.mkdir()
        (_plain if name == "plain" else _tied)(folder)
    return folder


def logprobs(folder: Path, text: Path, *, wrapped: bool) -> torch.Tensor:
    kind = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=True)
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()]
    with torch.inference_mode():
        logits = torch.cat([model(input_ids=torch.tensor([row])).logits[0].float() for row in rows])
    return torch.log_softmax(logits, dim=-1)


def dequantized(source: Path, checkpoint: Path, out: Path) -> Path:
    """The source with the weights of a checkpoint as compressed-tensors dequantizes them."""
    copytree(source, out)
    values = load_file(source / "model.safetensors")
    with Reader() as reader:
        view, linears = CheckpointView(read_index(checkpoint), reader), ComparedSource(source, reader).linears
        for layer in view.layers.values():
            stored = as_loaded(view, layer) if layer.is_quantized else None
            if layer.group is not None and stored is not None:
                linear, weight = linears[layer.name], weight_of(layer.group, stored)
                assert linear.part is None
                values[linear.weight] = weight.to(torch.bfloat16)
    save_file(values, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRAPPED, "plain", "phi3", "tied", "qwen3_moe"])
def test_it_is_closer_than_to_nearest_and_like_its_source(name: str, tmp_path: Path) -> None:
    source, wrapped = made(tmp_path / "source", name), name in WRAPPED
    text = write_calibration(tmp_path / "text.jsonl", rows=7, length=24, vocabulary=100)
    exact, found = logprobs(source, text, wrapped=wrapped), {}
    for rounding in ("nearest", "refit"):
        rules = rules_for(PlanRequest(scheme=SCHEME, rounding=rounding))
        if name == "tied":
            rules = (Rule(match="lm_head", scheme=SCHEME, rounding=rounding), *rules)
        out = tmp_path / rounding
        settings = Calibration(data=str(text))
        job = QuantizeJob(
            source=str(source), out=out, rules=rules, calibration=settings, trust_remote_code=True
        )
        plan, _, report = quantize_source(job)
        if report is not None:
            assert {group.name for group in report.groups} == {group.name for group in plan.groups}
            assert not report.fallbacks
        assert not [group for group in plan.groups if "vision" in group.name]
        assert ("lm_head" in {group.name for group in plan.groups}) == (name == "tied")
        ran = vexport("check", out, "--source", source, "--format", "json", "--quiet")
        (told,) = json.loads(ran.stdout)
        assert not [one for one in told["findings"] if (one["check"], one["severity"]) == ("source", "error")]
        copy = dequantized(source, out, tmp_path / f"{rounding}-copy")
        found[rounding] = float(kl_divergence(exact, logprobs(copy, text, wrapped=wrapped)).mean())
    assert found["refit"] < 0.9 * found["nearest"]
