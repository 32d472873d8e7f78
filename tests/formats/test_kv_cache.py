"""Scales of the KV cache in written checkpoints, in plans and in checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.architectures.families import save_family
from tests.models import problems, quantize, save_qwen3
from vexport.calibration.capture import query_scaling
from vexport.formats.config import kv_layout
from vexport.formats.plan import Plan
from vexport.names import Folder
from vexport.plan.build import PlanSettings
from vexport.plan.source import plan_source, scheme_rules
from vexport.records import AttentionLayer, KvCache
from vexport.rules import kv_cache as rules
from vexport.rules.book import Rule
from vexport.scenario import Planning

SCHEME = "FP8_DYNAMIC"
KINDS: tuple[KvCache, ...] = ("fp8", "fp8_per_head", "fp8_attention")


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
    assert str(scheme.strategy) == ("attn_head" if kind == "fp8_per_head" else "tensor")
    assert problems(written[kind]) == []
    plan = planned(source, kind)
    assert plan.output_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )
    assert [layer.name for layer in plan.attention] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]


def test_query_scales_equal_queries(
    source: Path, calibration: Path, written: dict[KvCache, Path]
) -> None:
    """Queries are observed after their norm and rotation, in the function of the attention."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    largest, attend = dict[int, float](), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def see(
        module: torch.nn.Module, query: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        largest[number] = max(largest.get(number, 0.0), float(query.abs().max()))
        return attend(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = see
    try:
        with torch.inference_mode():
            for row in calibration.read_text().splitlines():
                model(torch.tensor([json.loads(row)["input_ids"]]))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    tensors = load_file(written["fp8_attention"] / "model.safetensors")
    for number, value in largest.items():
        scale = tensors[f"model.layers.{number}.self_attn.q_scale"]
        assert scale.shape == (1,)
        assert float(scale) == pytest.approx(value / 448, rel=1e-6)
    for kind in ("fp8", "fp8_per_head"):
        others = load_file(written[kind] / "model.safetensors")
        assert not any(name.endswith("q_scale") for name in others)


def test_config_describes_attention_like_compressed_tensors(
    written: dict[KvCache, Path],
) -> None:
    """A group targets the class of the attention, which transformers' model has."""
    folder = written["fp8_attention"]
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(raw).config_groups.values()
    (group,) = [group for group in groups if group.weights is None]
    assert group.targets == ["Qwen3Attention"]
    assert group.input_activations is not None
    assert str(group.input_activations.strategy) == "tensor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        for name in ("q_scale", "k_scale", "v_scale"):
            loaded = getattr(layer.self_attn, name).float()
            stored = tensors[f"model.layers.{number}.self_attn.{name}"]
            torch.testing.assert_close(loaded.flatten(), stored, rtol=1e-2, atol=0)


WRONG_QUERY_SCALES: Mapping[str, tuple[torch.Tensor | None, Rule]] = {
    "missing": (None, rules.MISSING_QUERY_SCALE),
    "two values": (torch.ones(2) * 0.01, rules.SCALE_COUNT),
    "zero": (torch.zeros(1), rules.INVALID_SCALE),
    "negative": (torch.full((1,), -0.01), rules.INVALID_SCALE),
    "infinite": (torch.full((1,), torch.inf), rules.INVALID_SCALE),
    "integer": (torch.ones(1, dtype=torch.int32), rules.SCALE_DTYPE),
    "one": (torch.ones(1), rules.UNCALIBRATED),
    "reciprocal": (torch.full((1,), 100.0), rules.LARGE_SCALE),
    "small": (torch.full((1,), 1e-9), rules.SMALL_SCALE),
}


@pytest.mark.parametrize(
    ("value", "rule"), WRONG_QUERY_SCALES.values(), ids=list(WRONG_QUERY_SCALES)
)
def test_wrong_query_scales_are_found(
    tmp_path: Path, written: dict[KvCache, Path], value: torch.Tensor | None, rule: Rule
) -> None:
    out = copytree(written["fp8_attention"], tmp_path / "out")
    (out / "vexport.json").unlink()
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.self_attn.q_scale"
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = [finding for finding in problems(out) if finding.check == "kv_cache"]
    assert rule.id in [finding.rule for finding in found]
    assert {finding.where for finding in found} == {name}


def test_unread_names_are_found(tmp_path: Path, written: dict[KvCache, Path]) -> None:
    """vLLM maps `k_proj.k_scale` to the attention layer, but not `q_proj.q_scale`."""
    out = copytree(written["fp8_attention"], tmp_path / "out")
    (out / "vexport.json").unlink()
    tensors = {
        name.replace(".self_attn.q_scale", ".self_attn.q_proj.q_scale"): value
        for name, value in load_file(out / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = [finding for finding in problems(out) if finding.check == "kv_cache"]
    assert {finding.rule for finding in found} == {rules.UNREAD_QUERY_SCALE.id}
    assert len(found) == 3


def test_queries_that_transformers_scales(tmp_path: Path) -> None:
    """OPT multiplies queries by the scaling in transformers, but not in vLLM."""
    attention = torch.nn.Module()
    attention.scaling = 0.25  # type: ignore[assignment]
    assert query_scaling(attention, 0.25) == (1.0, 1.0)
    assert query_scaling(attention, 1.0) == (1.0, 0.25)


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
    with_queries = planned(tmp_path / "source", "fp8_attention").attention
    assert [layer.name for layer in with_queries] == modules
    for layer in with_queries:
        assert [spec.name for spec in kv_layout(layer)] == [
            f"{layer.name}.{kind}_scale" for kind in "kvq"
        ]


@pytest.mark.parametrize("family", ["phi3", "gemma3"])
def test_query_scales_of_families(tmp_path: Path, calibration: Path, family: str) -> None:
    """The models have q, k and v in one weight, or layers with a sliding window."""
    source = save_family(family, tmp_path / "source")
    options = ("--kv-cache", "fp8_attention", "--calibration", calibration)
    out = quantize(source, tmp_path / "out", SCHEME, *options)
    tensors = load_file(out / "model.safetensors")
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    scales = [value for name, value in tensors.items() if name.endswith(".q_scale")]
    assert len(scales) == layers
    assert all(float(value) > 0 for value in scales)
    assert not [finding for finding in problems(out) if finding.check == "kv_cache"]


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
