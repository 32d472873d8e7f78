"""Values of wrong types for each key of a checkpoint's JSON files.

They cause findings, never an internal error.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vexport.checks import INTERNAL, check_checkpoint, error_findings
from vexport.errors import InputError
from vexport.records import CheckReport, Json

# Wrong values. Each key gets some of them, in turn.
WRONG: tuple[Json, ...] = (
    [0],
    {"a": [1]},
    None,
    "x",
    math.nan,
    10**400,
    -1,
    True,
    [[["a"]]],
    0,
    -(10**400),
    [{}],
    math.inf,
    {},
    1.5,
    [None],
    "",
    10**12,
    [],
)
VALUES_PER_KEY = 3
W4A16: Json = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
    "sparsity_config": {},
    "transform_config": {
        "config_groups": {"R3": {"type": "hadamard", "apply": [{"location": "input"}]}}
    },
}
SIZES: Mapping[str, Json] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": ["full_attention"],
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "factor": 2.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "partial_rotary_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "num_labels": 2,
    "auto_map": {"AutoConfig": "a.B"},
}
EXPERTS: Mapping[str, Json] = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
FAMILIES: Mapping[str, dict[str, Json]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES},
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **SIZES,
        **EXPERTS,
    },
    "multimodal": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **SIZES},
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "rope_theta": 100.0},
    },
}
OTHER_METHODS: Mapping[str, dict[str, Json]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
SIDE_FILES: Mapping[str, dict[str, Json]] = {
    "generation_config.json": {"eos_token_id": [1], "temperature": 0.7, "do_sample": True},
    "tokenizer_config.json": {
        "chat_template": "x",
        "eos_token": "a",
        "added_tokens_decoder": {"1": {}},
    },
    "vexport.json": {
        "vexport": "1",
        "digests": {"model.safetensors": "xxh3_64:0123456789abcdef"},
        "smoothing": {"a": 1},
        "source": {"path": "x", "tensors": 3},
        "scheme": "W4A16",
        "layers": {"a": {"b": 1}},
    },
}


def paths(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each key in a JSON value, and of the first item of each list."""
    inner: Iterator[tuple[str | int, Json]] = iter(())
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list):
        inner = iter(enumerate(value[:1]))
    for key, each in inner:
        yield (*path, key)
        yield from paths(each, (*path, key))


def changed(values: dict[str, Json], path: tuple[str | int, ...], value: Json) -> str:
    """Return the JSON text with another value at the path."""
    copied = json.loads(json.dumps(values))
    part = copied
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(copied)


def tiny(folder: Path) -> Path:
    """Write one layer of a model in W4A16. It has few tensors, for thousands of checks."""
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": np.ones((64, 64), np.float16),
        "model.norm.weight": np.ones(64, np.float16),
        "lm_head.weight": np.ones((64, 64), np.float16),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        place = f"model.layers.0.{name}"
        tensors |= {
            f"{place}.weight_packed": np.arange(64 * 8, dtype=np.int32).reshape(64, 8),
            f"{place}.weight_scale": np.full((64, 2), 0.01, np.float16),
            f"{place}.weight_shape": np.array([64, 64]),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def checked(folder: Path) -> CheckReport:
    """Return the report of `check --static`, also if it cannot read the checkpoint."""
    try:
        return check_checkpoint(str(folder))
    except InputError as error:
        return CheckReport(checkpoint=str(folder), ok=False, findings=error_findings(error))


def internal_errors(folder: Path, file: str, values: dict[str, Json]) -> list[str]:
    """Return the internal errors for all keys of a file, each with its key and value."""
    turn, found = count(), []
    for path in paths(values):
        for _ in range(VALUES_PER_KEY):
            value = WRONG[next(turn) % len(WRONG)]
            (folder / file).write_text(changed(values, path, value))
            wrong = [each for each in checked(folder).findings if each.check == INTERNAL]
            found += [f"{file} {path} {str(value)[:40]}: {each.got}" for each in wrong]
    (folder / file).write_text(json.dumps(values))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_values_in_config(tmp_path: Path, family: str) -> None:
    values = {**FAMILIES[family], "quantization_config": {**W4A16}, "dtype": "float16"}  # type: ignore[dict-item]
    if family != "qwen3":
        values["quantization_config"] = None
    assert internal_errors(tiny(tmp_path / "model"), "config.json", values) == []


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_wrong_values_of_other_methods(tmp_path: Path, method: str) -> None:
    folder = tiny(tmp_path / "model")
    quantization: dict[str, Json] = {
        "quantization_config": {**OTHER_METHODS[method], "modules_to_not_convert": ["lm_head"]}
    }
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    fixed = {
        key: value
        for key, value in FAMILIES["qwen3"].items()
        if key in ("architectures", "model_type")
    }
    assert internal_errors(folder, "config.json", {**fixed, **quantization}) == []


@pytest.mark.parametrize("file", SIDE_FILES)
def test_wrong_values_in_side_files(tmp_path: Path, file: str) -> None:
    folder = tiny(tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps({**FAMILIES["qwen3"], "quantization_config": W4A16})
    )
    assert internal_errors(folder, file, SIDE_FILES[file]) == []


@pytest.mark.parametrize(
    "key", ["num_local_experts", "num_hidden_layers", "vocab_size", "head_dim"]
)
def test_sizes_beyond_memory(tmp_path: Path, key: str) -> None:
    folder = tiny(tmp_path / "model")
    for value in (10**9, 10**30, 10**400):
        (folder / "config.json").write_text(json.dumps({**FAMILIES["qwen3"], key: value}))
        findings = [each for each in checked(folder).findings if each.severity == "error"]
        named = any(each.where.endswith(f": {key}") for each in findings)
        assert findings if value == 10**9 else named
