"""Scales of the KV cache in written checkpoints, in plans and in checks."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.architectures.families import save_family
from tests.models import problems, quantize, save_qwen3
from vexport.formats.config import kv_layout
from vexport.formats.plan import Plan
from vexport.names import Folder
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_source, scheme_rules
from vexport.records import AttentionLayer, KvCache
from vexport.scenario import Planning

SCHEME = "FP8_DYNAMIC"
KINDS: tuple[KvCache, ...] = ("fp8", "fp8_per_head")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Qwen3, which normalizes keys before rotating them."""
    return save_qwen3(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def written(
    source: Path,
    calibration: Path,
    tmp_path_factory: pytest.TempPathFactory,
    matmul_in_model_dtype_for_module: None,
) -> dict[KvCache, Path]:
    """Write a checkpoint with each kind of cache. Tests only read it."""
    root, options = tmp_path_factory.mktemp("written"), ("--calibration", calibration)
    return {
        kind: quantize(source, root / kind, SCHEME, "--kv-cache", kind, *options) for kind in KINDS
    }


def planned(source: Path, kind: KvCache) -> Plan:
    _, plan = plan_source(
        Folder.at(source), scheme_rules(Planning(scheme=SCHEME)), PlanSettings(kv_cache=kind)
    )
    return plan


@pytest.mark.parametrize("kind", KINDS)
def test_scales_equal_models_cache(
    source: Path, calibration: Path, written: dict[KvCache, Path], kind: KvCache
) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rows = calibration.read_text().splitlines()
    tensors = load_file(written[kind] / "model.safetensors")
    largest: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for row in rows:
            cache = model(
                torch.tensor([json.loads(row)["input_ids"]]), use_cache=True
            ).past_key_values
            for number, layer in enumerate(cache.layers):
                for name, states in (("k_scale", layer.keys), ("v_scale", layer.values)):
                    heads = states.float().abs().amax((0, 2, 3))
                    key = f"model.layers.{number}.self_attn.{name}"
                    largest[key] = torch.maximum(largest.get(key, heads), heads)
    assert {name for name in tensors if name.endswith(("k_scale", "v_scale"))} == largest.keys()
    for name, heads in largest.items():
        expected = heads.reshape(-1, 1, 1) if kind == "fp8_per_head" else heads.max().reshape(1)
        torch.testing.assert_close(tensors[name], expected / 448, rtol=1e-6, atol=0)
    raw = json.loads((written[kind] / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(raw).kv_cache_scheme
    assert scheme is not None
    assert str(scheme.strategy) == {"fp8": "tensor", "fp8_per_head": "attn_head"}[kind]
    assert problems(written[kind]) == []
    plan = planned(source, kind)
    assert plan.output_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )
    assert [layer.name for layer in plan.attention] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("phi3", ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        ("qwen3-next", ["model.layers.3.self_attn"]),
        ("gemma3-vision", [f"language_model.model.layers.{i}.self_attn" for i in range(2)]),
    ],
)
def test_attention_layers_are_found(tmp_path: Path, family: str, modules: list[str]) -> None:
    """The models have q, k and v in one weight, linear attention, or a vision tower."""
    plan = planned(save_family(family, tmp_path / "source"), "fp8_per_head")
    assert plan.refusals == ()
    assert [layer.name for layer in plan.attention] == modules
    assert {layer.heads for layer in plan.attention} == {2}


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    (refusal,) = planned(save_family("deepseek-v3", tmp_path / "source"), "fp8").refusals
    assert (refusal.check, refusal.got) == ("kv_cache", "multi-head latent attention")
    assert refusal.where == "model.layers.0.self_attn"


def test_scale_names_equal_vllms() -> None:
    """vLLM's attention module is the attribute `attn` of the model's attention.

    vLLM adds that name unless the layer's name ends with it.
    """
    short = kv_layout(AttentionLayer(name="h.0.attn", heads=None))
    assert [spec.name for spec in short] == ["h.0.attn.attn.k_scale", "h.0.attn.attn.v_scale"]
    usual = kv_layout(AttentionLayer(name="layers.0.self_attn", heads=4))
    assert [(spec.name, spec.shape) for spec in usual] == [
        ("layers.0.self_attn.k_scale", (4, 1, 1)),
        ("layers.0.self_attn.v_scale", (4, 1, 1)),
    ]
