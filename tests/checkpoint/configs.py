"""Random quantization arguments and configs, and what their own libraries and vexport say of each."""

import json
import random
import warnings
from collections.abc import Mapping

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from transformers import LlamaConfig

from vexport.architectures.configs import config_table
from vexport.checks.vllm.decoder import missing_sizes
from vexport.checks.vllm.fields import wrong_types
from vexport.checks.vllm.settings import wrong_settings
from vexport.formats.arguments import QuantArgs, SchemeArgs, contradictions
from vexport.formats.parsing import MOST_BITS, parse_args
from vexport.types import Json

JSON: tuple[Json, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    8,
    4,
    128,
    1.5,
    2.0,
    -0.0,
    10**6,
    10**30,
    "",
    "8",
    "x",
    [],
    [1],
)
JSON += ([128, 128], {}, {"a": 1}, float("inf"), "\ud800")
ARGUMENTS: Mapping[str, tuple[Json, ...]] = {
    "num_bits": (2, 3, 4, 8, 16, 17, "4", 4.0),
    "type": ("int", "float", "INT", "Float", "bfloat"),
    "symmetric": (True, False, "true", 0, "no"),
    "group_size": (-1, 0, 1, 16, 32, 128, -2, "128", 128.0),
    "strategy": (
        "tensor",
        "channel",
        "group",
        "block",
        "token",
        "tensor_group",
        "attn_head",
        "GROUP",
        "rows",
    ),
    "block_structure": ([128, 128], "128x128", [64], [0, 0], "128X128", ["a", 1], [128, 128, 1], "8x"),
    "dynamic": (True, False, "local", "LOCAL", "yes", "true", 1),
    "actorder": (None, True, False, "group", "weight", "static", "dynamic", "GROUP", "none"),
    "scale_dtype": ("torch.float8_e4m3fn", "float16", "torch.bfloat16", "uint8", "torch", "nn"),
    "zp_dtype": ("torch.int8", "int8", "torch.uint8", "x"),
    "observer": ("minmax", "mse", None, 5),
    "observer_kwargs": ({}, {"a": 1}, None, []),
    "is_online": (True, None),
    "scale": (1,),
}


def random_arguments(rng: random.Random) -> dict[str, Json]:
    """Up to seven arguments, most of them with a value that one of them may have."""
    keys = rng.sample([*ARGUMENTS], rng.randint(0, 7))
    return {key: rng.choice(JSON if rng.random() < 0.15 else ARGUMENTS[key]) for key in keys}


def argument_disagreement(raw: dict[str, Json]) -> str | None:
    """Where vexport and compressed-tensors differ on arguments; None where they agree."""
    ours = _vexport(raw)
    try:
        with warnings.catch_warnings(action="ignore"):  # of an observer that dynamic arguments have not
            theirs = QuantizationArgs.model_validate(raw)
    except Exception as error:
        return None if isinstance(ours, str) else f"{raw}: refused ({error!s:.200}), vexport {ours}"
    if isinstance(ours, str):
        # Refused on purpose: no scheme has so many bits, and sizes follow from them.
        if not 0 < theirs.num_bits <= MOST_BITS:
            return None
        return f"{raw}: compressed-tensors {theirs!r}, vexport refuses ({ours})"
    for key in ("num_bits", "symmetric", "group_size", "dynamic"):
        if getattr(theirs, key) != getattr(ours, key):
            return f"{raw}: {key} {getattr(theirs, key)!r}, vexport {getattr(ours, key)!r}"
    if QuantizationStrategy(theirs.strategy).value != ours.strategy:
        return f"{raw}: strategy {theirs.strategy!r}, vexport {ours.strategy!r}"
    return None


def _vexport(raw: dict[str, Json]) -> QuantArgs | str:
    """What is read, or why it is refused."""
    args = parse_args(raw)
    if isinstance(args, str):
        return args
    return next(contradictions(SchemeArgs(weights=args, input_activations=None)), args)


def random_model_config(rng: random.Random) -> dict[str, Json]:
    """The config.json of a small Llama, with up to two values of another kind."""
    config: dict[str, Json] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    fields = {**config_table().base, **config_table().fields["llama"]}
    for key in rng.sample([*fields, "rope_parameters", "layer_types"], rng.randint(0, 2)):
        config[key] = rng.choice(JSON)
    return config


def config_disagreement(config: dict[str, Json]) -> str | None:
    """Where transformers refuses what vexport takes, or vexport names a type that transformers takes."""
    types = [*wrong_types("llama", config)]
    ours = bool(types or [*wrong_settings(config)] or missing_sizes("LlamaForCausalLM", config))
    try:
        with warnings.catch_warnings(action="ignore"):
            LlamaConfig.from_dict(json.loads(json.dumps(config)))
    except Exception as error:
        return None if ours else f"{config}: transformers refuses ({error!r:.300}), vexport takes it"
    # Fields of every config are held to their types here though transformers only reads them.
    own = [setting for setting in types if setting.key not in config_table().base]
    return f"{config}: transformers takes it, vexport {own}" if own else None
