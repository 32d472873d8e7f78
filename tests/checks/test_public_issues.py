"""Checkpoints that people have reported as broken, in small: the check says what the issue says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.sketches import QWEN3_MOE, sketch, write_tensors
from tests.models import problems
from tests.mutations.edits import (
    QUANTIZATION,
    WHOLE,
    Change,
    Tensors,
    add,
    all_of,
    config,
    put,
    spoiled,
    tensors,
)
from vexport.checks import check_checkpoint
from vexport.checks.vllm.view import Target
from vexport.records import Json

TESTS = Path(__file__).parent.parent
PEER, CHECKPOINTS, METHODS = (
    TESTS / "peer",
    TESTS / "producers" / "checkpoints",
    TESTS / "producers" / "methods",
)
ROUTER, DOWN = "model.layers.0.router.proj", "model.layers.0.mlp.down_proj"
MERGING = "multi_modal_projector.patch_merger.merging_layer"
VLLM, LLM_COMPRESSOR = "vllm-project/vllm", "vllm-project/llm-compressor"
SPARSE: Json = {
    "format": "sparse-bitmask",
    "global_sparsity": 0.46,
    "sparsity_structure": "2:4",
    "targets": ["Linear"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A sound checkpoint, what the reported one had otherwise, and the family and place of the error."""

    sound: Path
    change: Change
    check: str
    where: str


@tensors
def router_in_nvfp4(values: Tensors) -> None:
    """Under the name that Gemma 4 gives it."""
    rows, columns = values.pop("model.layers.0.mlp.gate.weight").shape
    values[f"{ROUTER}.weight_packed"] = torch.full((rows, columns // 2), 17, dtype=torch.uint8)
    values[f"{ROUTER}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    values[f"{ROUTER}.weight_global_scale"] = torch.ones(1)


@tensors
def projector_in_int4(values: Tensors) -> None:
    """Mistral 3's, which vLLM builds without a quantization config."""
    for name in [name for name in values if name.startswith("model.layers.0.mlp.up_proj.")]:
        values[f"{MERGING}.{name.rpartition('.')[2]}"] = values[name].clone()
    for name in [name for name in values if name.startswith(("model.", "lm_head."))]:
        values[f"language_model.{name}"] = values.pop(name)


@tensors
def head_in_nvfp4(values: Tensors) -> None:
    rows, columns = values["lm_head.weight"].shape
    values["lm_head.weight"] = torch.full((rows, columns // 2), 17, dtype=torch.uint8)
    values["lm_head.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    values |= {"lm_head.weight_scale_2": torch.tensor(0.01), "lm_head.input_scale": torch.tensor(0.01)}


@tensors
def nested_names(values: Tensors) -> None:
    for name in [name for name in values if name.startswith("model.")]:
        values[f"model.language_model.{name}"] = values.pop(name)


REPORTED: Mapping[str, Reported] = {
    f"{VLLM}#45102": Reported(
        sound=METHODS / "modelopt-llama-NVFP4-KV", change=head_in_nvfp4, check="targets", where="lm_head"
    ),
    f"{LLM_COMPRESSOR}#2714": Reported(
        sound=PEER / "moe-NVFP4A16",
        change=all_of(
            router_in_nvfp4,
            config(WHOLE, architectures=["Gemma4ForCausalLM"]),
            config(QUANTIZATION, ignore=["lm_head"]),
        ),
        check="targets",
        where=ROUTER,
    ),
    f"{LLM_COMPRESSOR}#1241": Reported(
        sound=PEER / "llama-FP8_DYNAMIC",
        change=all_of(
            config(QUANTIZATION, sparsity_config=SPARSE),
            add("model.embed_tokens.weight.bitmask", torch.zeros(8, dtype=torch.uint8)),
        ),
        check="config",
        where="sparsity_config",
    ),
    f"{VLLM}#45320": Reported(
        sound=METHODS / "modelopt-llama-NVFP4-KV",
        change=put(f"{DOWN}.input_scale", torch.zeros_like),
        check="values",
        where=f"{DOWN}.input_scale",
    ),
    f"{LLM_COMPRESSOR}#959": Reported(
        sound=PEER / "llama-FP8_DYNAMIC",
        change=config(WHOLE, quantization_config=None),
        check="config",
        where="quantization_config",
    ),
    f"{LLM_COMPRESSOR}#2568": Reported(
        sound=PEER / "llama-W4A16",
        change=nested_names,
        check="completeness",
        where="model.language_model.model",
    ),
    f"{VLLM}#45312": Reported(
        sound=CHECKPOINTS / "llmcompressor-llama-KV",
        change=config((*QUANTIZATION, "kv_cache_scheme"), num_bits=4),
        check="kv_cache",
        where="kv_cache_scheme",
    ),
    f"{LLM_COMPRESSOR}#2255": Reported(
        sound=CHECKPOINTS / "llmcompressor-llama-GPTQ-ASYM",
        change=config((*QUANTIZATION, "config_groups", "group_0", "weights"), symmetric=True),
        check="completeness",
        where="weight_zero_point",
    ),
    f"{LLM_COMPRESSOR}#1652": Reported(
        sound=PEER / "llama-W4A16",
        change=all_of(projector_in_int4, config(WHOLE, architectures=["Mistral3ForConditionalGeneration"])),
        check="targets",
        where=MERGING,
    ),
}


@pytest.mark.parametrize("issue", REPORTED)
def test_what_was_reported_is_found(issue: str, tmp_path: Path) -> None:
    reported = REPORTED[issue]
    known = {(one.check, one.where) for one in problems(reported.sound) if one.severity == "error"}
    found = problems(spoiled(reported.sound, tmp_path / "reported", reported.change))
    errors = {(one.check, one.where) for one in found if one.severity == "error"} - known
    assert any(check == reported.check and reported.where in where for check, where in errors), errors


def test_a_head_that_a_nested_config_unties(tmp_path: Path) -> None:
    """vllm-project/vllm#51063: the outer config ties it, and the file has one of its own."""

    @tensors
    def nested(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(("model.", "lm_head."))]:
            values[f"language_model.{name}"] = values.pop(name)

    change = all_of(nested, config(WHOLE, tie_word_embeddings=True))
    folder = spoiled(PEER / "llama-W4A16", tmp_path / "reported", change)
    report = check_checkpoint(str(folder))
    (found,) = [
        one for one in report.findings if one.where == "language_model.lm_head.weight" and "head" in one.got
    ]
    assert found.severity == "warning"


@pytest.mark.parametrize(("width", "refused"), [(384, {8}), (320, {1, 2, 4, 8})])
def test_blocks_of_experts_that_ranks_cut(width: int, refused: set[int], tmp_path: Path) -> None:
    """vllm-project/vllm#54178 and #52997: vLLM 0.32 takes blocks of experts apart, down to 32 x 32."""
    sizes = {"moe_intermediate_size": width, "hidden_size": 1024, "num_experts": 8}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    folder = sketch(tmp_path / "sketch", {**QWEN3_MOE, **sizes, **heads}, "FP8_BLOCK", {})
    _as_native_fp8(folder)
    for ranks in (1, 2, 4, 8):
        report = check_checkpoint(str(folder), Target(tp=(ranks,)))
        found = [
            one for one in report.findings if one.check in ("devices", "shapes") and "experts" in one.where
        ]
        assert bool(found) is (ranks in refused), (ranks, found)


def _as_native_fp8(folder: Path) -> None:
    """The headers of a sketch under the names that DeepSeek and Qwen use."""
    file = folder / "model.safetensors"
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    stored = {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items()}
    write_tensors(
        file, {name.replace("weight_scale", "weight_scale_inv"): each for name, each in stored.items()}
    )
    whole = json.loads((folder / "config.json").read_text())
    kept = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))]
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    whole["quantization_config"] = {**method, "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(whole))
