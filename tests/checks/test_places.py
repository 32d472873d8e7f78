"""Findings on config.json name the key, the value found, the value needed, and the remedy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import Good, problems, save_llama
from tests.mutations.edits import spoiled
from vexport.checks import check_checkpoint
from vexport.checks.model import WITH_HEAD
from vexport.records import Finding, Json

NO_KEY = object()
LLAMA = "LlamaForCausalLM"
OLD_ROPE: Json = {"rope_type": "yarn", "factor": 4.0}
NEW_ROPE: Json = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "key", "rule", "facts"),
    [
        ({"model_type": 5}, "model_type", "model-type-name", {"value": 5}),
        ({"architectures": LLAMA}, "architectures", "architectures", {"value": LLAMA}),
        (
            {"architectures": ["NobodysForCausalLM"]},
            "architectures",
            "unknown-class",
            {"model": "NobodysForCausalLM", "reason": "an unknown class", "version": "0.32"},
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures",
            "no-output-layer",
            {"model": "LlamaForSequenceClassification"},
        ),
        (
            {"model_type": "no_such_model"},
            "model_type",
            "model-type",
            {"value": "no_such_model", "model": LLAMA},
        ),
        (
            {"architectures": NO_KEY},
            "architectures",
            "assumed-class",
            {"model": LLAMA, "kind": "llama"},
        ),
        (
            {"architectures": NO_KEY, "model_type": "qwen3"},
            "architectures",
            "embedding-class",
            {"base": "Qwen3Model", "kind": "qwen3"},
        ),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads",
            "key-value-heads",
            {"value": 3, "heads": 4},
        ),
        ({"rms_norm_eps": 1.5}, "rms_norm_eps", "epsilon", {"value": 1.5, "most": 0.01}),
        (
            {"rope_parameters": NEW_ROPE, "rope_scaling": OLD_ROPE},
            "rope_scaling",
            "rope-scaling",
            {"old": OLD_ROPE, "new": NEW_ROPE},
        ),
        (
            {"num_labels": 2_000_000},
            "num_labels",
            "labels",
            {"value": 2_000_000, "most": 1_000_000},
        ),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers",
            "impossible-count",
            {"reason": "1e+09 in a checkpoint of 30 tensors"},
        ),
        ({"hidden_size": None}, "hidden_size", "size", {"value": None}),
        ({"dtype": "float16"}, "dtype", "overflowing-dtype", {"dtype": "float16"}),
        ({"rope_theta": -1}, "rope_theta", "rope-value", {"value": -1}),
    ],
)
def test_model_findings_are_at_the_key(
    tmp_path: Path, changes: dict[str, object], key: str, rule: str, facts: dict[str, object]
) -> None:
    found = model_findings(tmp_path / "model", changes)
    finding = next(each for each in found if each.where.endswith(f"config.json: {key}"))
    assert (finding.rule, finding.facts) == (f"model/{rule}", facts)
    is_warning = finding.rule == "model/assumed-class"
    assert finding.severity == ("warning" if is_warning else "error")


def model_findings(folder: Path, changes: dict[str, object]) -> list[Finding]:
    """Return the findings on a model with these changes of its config.json."""
    file = save_llama(folder) / "config.json"
    config: dict[str, Json] = json.loads(file.read_text())
    whole = {**config, **changes}
    file.write_text(json.dumps({key: each for key, each in whole.items() if each is not NO_KEY}))
    return [each for each in check_checkpoint(str(folder)).findings if each.check == "model"]


def test_large_position_table_is_warning(tmp_path: Path) -> None:
    (finding,) = model_findings(tmp_path / "model", {"max_position_embeddings": 10**9})
    assert (finding.severity, finding.rule) == ("warning", "model/position-table")
    assert finding.facts["most"] == 8


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        ("Gemma3ForConditionalGeneration", "Gemma3Model"),
        ("GPT2LMHeadModel", "GPT2Model"),
    ],
)
def test_base_model_of_class(name: str, base: str) -> None:
    """vLLM uses the base model if config.json has no `architectures`."""
    assert WITH_HEAD.sub("Model", name) == base


def test_undeclared_kv_cache_is_at_the_scheme(good: Good, tmp_path: Path) -> None:
    """The scales of the KV cache are stored, but the config does not declare its scheme."""
    folder = spoiled(good("W8A8"), tmp_path / "undeclared", _add_cache_scales)
    (finding,) = (each for each in problems(folder) if each.check == "kv_cache")
    place = f"{folder / 'config.json'}: quantization_config.kv_cache_scheme"
    assert (finding.rule, finding.where) == ("kv_cache/undeclared", place)


def _add_cache_scales(folder: Path) -> None:
    file = folder / "model.safetensors"
    values = load_file(file)
    layers = {name.partition(".self_attn.")[0] for name in values if ".self_attn." in name}
    for layer in layers:
        for scale in ("k_scale", "v_scale"):
            values[f"{layer}.self_attn.{scale}"] = torch.tensor(0.01)
    save_file(values, file, metadata={"format": "pt"})
