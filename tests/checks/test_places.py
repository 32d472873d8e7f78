"""Findings on config.json name the key, the value found, the value needed, and the remedy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import Good, problems, save_llama
from tests.mutations.edits import spoiled
from tests.texts import assert_contains
from vexport.checks import check_checkpoint
from vexport.checks.model import WITH_HEAD
from vexport.records import Json, Severity

NO_KEY = object()
RESTORE = "original config.json"


@pytest.mark.parametrize(
    ("changes", "severity", "key", "got", "expected", "fix"),
    [
        ({"model_type": 5}, "error", "model_type", "5", "name of the architecture", RESTORE),
        (
            {"architectures": "LlamaForCausalLM"},
            "error",
            "architectures",
            '"LlamaForCausalLM"',
            "list of names",
            RESTORE,
        ),
        (
            {"architectures": ["NobodysForCausalLM"]},
            "error",
            "architectures",
            "NobodysForCausalLM",
            "vLLM 0.32 or of transformers",
            RESTORE,
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "error",
            "architectures",
            "no tensor of its output layer",
            "all its tensors",
            RESTORE,
        ),
        (
            {"model_type": "no_such_model"},
            "error",
            "model_type",
            "no_such_model",
            "model type of LlamaForCausalLM",
            RESTORE,
        ),
        (
            {"architectures": NO_KEY},
            "warning",
            "architectures",
            "LlamaForCausalLM for model_type llama",
            "name of the model class",
            '"architectures": ["LlamaForCausalLM"]',
        ),
        (
            {"architectures": NO_KEY, "model_type": "qwen3"},
            "error",
            "architectures",
            "Qwen3Model for qwen3",
            "name of the model class",
            RESTORE,
        ),
        (
            {"num_key_value_heads": 3},
            "error",
            "num_key_value_heads",
            "3",
            "divisor of num_attention_heads",
            RESTORE,
        ),
        ({"rms_norm_eps": 1.5}, "error", "rms_norm_eps", "1.5", "from 0 to 0.01", RESTORE),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "error",
            "rope_scaling",
            '"factor": 4.0}, but different rope_parameters {"rope_type": "yarn", "factor": 2.0',
            "same values as rope_parameters",
            RESTORE,
        ),
        ({"num_labels": 2_000_000}, "error", "num_labels", "2000000", "at most 1,000,000", RESTORE),
        (
            {"max_position_embeddings": 10**9},
            "warning",
            "max_position_embeddings",
            "GiB",
            "at most 8 GiB",
            "max_position_embeddings",
        ),
        (
            {"num_hidden_layers": 10**9},
            "error",
            "num_hidden_layers",
            "1e+09",
            "fits the stored tensors",
            RESTORE,
        ),
        (
            {"hidden_size": None},
            "error",
            "hidden_size",
            "null",
            "whole number above zero",
            RESTORE,
        ),
        ({"dtype": "float16"}, "error", "dtype", "float16", "bfloat16", "set dtype to bfloat16"),
        ({"rope_theta": -1}, "error", "rope_theta", "-1", "above zero", RESTORE),
    ],
)
def test_model_findings_are_at_the_key(
    tmp_path: Path,
    changes: dict[str, object],
    severity: Severity,
    key: str,
    got: str,
    expected: str,
    fix: str,
) -> None:
    folder = save_llama(tmp_path / "model")
    file = folder / "config.json"
    config: dict[str, Json] = json.loads(file.read_text())
    whole = {**config, **changes}
    file.write_text(json.dumps({key: each for key, each in whole.items() if each is not NO_KEY}))
    found = [each for each in check_checkpoint(str(folder)).findings if each.check == "model"]
    finding = next(each for each in found if each.where == f"{file}: {key}")
    assert finding.severity == severity
    assert_contains(finding.got, got)
    assert_contains(finding.expected, expected)
    assert_contains(finding.fix, fix)


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
    assert (finding.severity, finding.where) == ("error", place)
    assert_contains(finding.fix, "kv_cache_scheme")


def _add_cache_scales(folder: Path) -> None:
    file = folder / "model.safetensors"
    values = load_file(file)
    layers = {name.partition(".self_attn.")[0] for name in values if ".self_attn." in name}
    for layer in layers:
        for scale in ("k_scale", "v_scale"):
            values[f"{layer}.self_attn.{scale}"] = torch.tensor(0.01)
    save_file(values, file, metadata={"format": "pt"})
