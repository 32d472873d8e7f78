"""Scales of the KV cache: pairs, layers without scales, and layers without a cache."""

from collections.abc import Iterable
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

import pytest
import torch

from tests.checks.quant_methods import write
from tests.models import Good
from tests.mutations.edits import QUANTIZATION, WHOLE, add, all_of, config, drop_if, spoiled
from vexport.architectures import architecture_table
from vexport.architectures.fusion import fuse
from vexport.architectures.linears import Names, attention_layers
from vexport.checks import check_checkpoint
from vexport.records import Finding, Json, Severity

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHODS = Path(__file__).parent.parent / "producers" / "methods"
SCHEME: Json = {
    "type": "float",
    "num_bits": 8,
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
SCALE = torch.full((1,), 0.02)


def found(folder: Path) -> list[Finding]:
    return [each for each in check_checkpoint(str(folder)).findings if each.check == "kv_cache"]


def with_scales(good: Path, folder: Path, scales: Iterable[str]) -> Path:
    """Add the named scales to a checkpoint of compressed-tensors with an FP8 KV cache."""
    adding = [add(f"model.layers.{name}", SCALE) for name in scales]
    return spoiled(good, folder, all_of(config(QUANTIZATION, kv_cache_scheme=SCHEME), *adding))


@pytest.mark.parametrize("producer", ["modelopt-llama-NVFP4-KV", "quark-llama-fp8-KV"])
@pytest.mark.parametrize(
    ("dropped", "severities"),
    [("", []), ("k", ["error"]), ("v", ["warning"]), ("kv", ["warning"])],
)
def test_base_method_pairs_scales(
    producer: str, dropped: str, severities: list[Severity], tmp_path: Path
) -> None:
    folder = copytree(METHODS / producer, tmp_path / "out")
    endings = tuple(
        f"{each}_proj.{name}" for each in dropped for name in (f"{each}_scale", "output_scale")
    )
    if endings:
        drop_if(lambda name: name.endswith(endings))(folder)
    assert [each.severity for each in found(folder)] == severities


@pytest.mark.parametrize(
    ("name", "severities"),
    [("v_proj.output_scale", ["error"]), ("v_scale", ["error"]), ("kv_scale", [])],
)
def test_fp8_scales_of_requested_cache(
    llama: Path, name: str, severities: list[Severity], tmp_path: Path
) -> None:
    """vLLM reads the scales with `--kv-cache-dtype fp8`, although the config has no KV cache."""
    adding = [add(f"model.layers.{layer}.self_attn.{name}", SCALE) for layer in range(3)]
    source = write("fp8-block", llama, tmp_path / "fp8")
    folder = spoiled(source, tmp_path / "out", all_of(*adding))
    (*others,) = found(folder)
    assert {each.severity for each in others} == set(severities)
    assert {each.rule for each in others} <= {"kv_cache/only-value-scale-on-request"}


@pytest.mark.parametrize(
    ("scales", "severities"),
    [
        (["0.self_attn.k_scale", "0.self_attn.v_scale"], ["error"] * 2),
        ([f"{layer}.self_attn.kv_scale" for layer in range(3)], ["error"] * 3),
        ([], ["warning"]),
    ],
)
def test_compressed_tensors_scales(
    good: Good, scales: Iterable[str], severities: list[Severity], tmp_path: Path
) -> None:
    """A layer of another checkpoint's producer may have no scale, or only kv_scale for keys."""
    folder = with_scales(good("W8A8"), tmp_path / "out", scales)
    assert [each.severity for each in found(folder)] == severities


def test_layers_that_share_a_cache(good: Good, tmp_path: Path) -> None:
    names = [f"{layer}.self_attn.{scale}" for layer in (0, 1) for scale in ("k_scale", "v_scale")]
    folder = with_scales(good("W8A8"), tmp_path / "out", names)
    config(WHOLE, num_kv_shared_layers=1)(folder)
    (shared,) = found(folder)
    assert (shared.severity, shared.where) == ("warning", "model.layers.2.self_attn")


@pytest.mark.parametrize(
    ("architecture", "leaves", "expected"),
    [
        ("OlmoHybridForCausalLM", "q_proj k_proj v_proj g_proj", False),
        ("OlmoHybridForCausalLM", "q_proj k_proj v_proj", True),
        ("KimiLinearForCausalLM", "q_proj k_proj v_proj b_proj f_a_proj", False),
        ("BailingMoeV3ForCausalLM", "q_proj k_proj v_proj b_proj", False),
        ("Qwen3ForCausalLM", "qkv_proj", True),
        ("Gemma3nForConditionalGeneration", "q_proj k_proj v_proj", True),
    ],
)
def test_linear_attention_has_no_cache(architecture: str, leaves: str, expected: bool) -> None:
    table = architecture_table().architectures[architecture]
    (layer,) = fuse([f"model.layers.0.self_attn.{leaf}" for leaf in leaves.split()], table)
    names = Names(
        architecture=table, text={}, layers=1, experts_known=True, transposed_experts=False
    )
    rows = dict.fromkeys(layer.members)
    assert bool(attention_layers([layer], rows, names, per_head=False)) is expected


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("k_scale", "v_scale", "expected"),
    [(0.5, 0.25, (0.5, 0.25)), (0.5, None, (0.5, 0.5)), (None, None, (1, 1)), (None, 0.25, None)],
)
def test_vllm_pairs_scales(
    k_scale: float | None, v_scale: float | None, expected: tuple[float, float] | None
) -> None:
    """Compare the rule with the class of vLLM that reads the scales."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    settings: QuantizationConfig = Fp8Config()
    method, layer = BaseKVCacheMethod(settings), torch.nn.Module()
    layer.kv_cache_dtype = "fp8"  # type: ignore[assignment]
    set_default_quant_scales(layer, register_buffer=True)
    method.create_weights(layer)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None:
            getattr(layer, name).weight_loader(getattr(layer, name), torch.tensor([value]))
    if expected is None:
        with pytest.raises(AssertionError):
            method.process_weights_after_loading(layer)
        return
    method.process_weights_after_loading(layer)
    used = [float(getattr(layer, name)) for name in ("_k_scale_float", "_v_scale_float")]
    assert used == [*expected]
