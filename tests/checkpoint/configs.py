"""Random quantization arguments and configs, and what their own libraries and vexport say of each."""

import json
import random
import warnings
from collections.abc import Mapping
from functools import cache

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vexport.architectures import architecture_table
from vexport.architectures.configs import config_table
from vexport.architectures.decoders import decoders
from vexport.checks.vllm.decoder import SIZES, missing_sizes
from vexport.checks.vllm.fields import wrong_types
from vexport.checks.vllm.settings import WrongSetting, wrong_settings
from vexport.formats.arguments import QuantArgs, SchemeArgs, contradictions
from vexport.formats.parsing import MOST_BITS, parse_args
from vexport.types import Json
from vexport.types.time_limit import time_limit

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
    35,
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


# Whose config has rules on keys that no other has, of which vexport knows none.
OWN_RULES = frozenset(
    {"cohere2_moe", "dbrx", "deepseek_v4", "falcon", "falcon_h1", "falcon_mamba", "gemma3n_text"}
    | {"gptj", "granitemoehybrid", "hy_v4", "inkling_text", "jamba", "laguna", "longcat_flash", "mamba"}
    | {"mamba2", "qwen4_exp", "qwen4_exp_text", "zamba2"}
)
KINDS = sorted(config_table().fields.keys() - OWN_RULES)
# In which transformers makes a list of layers, and goes through it again and again.
MANY = (10**6, 10**30)
MOST_SECONDS = 10.0
# Looked into by transformers where they are true; vexport holds them to their types.
ALSO_UNDECLARED = ("layer_types", "rope_parameters")


@cache
def sound_config(kind: str) -> str:
    """The config.json of a model type: transformers' own defaults."""
    defaults = CONFIG_MAPPING[kind]().to_dict()
    kept = {key: value for key, value in defaults.items() if value is not None and "label" not in key}
    return json.dumps({**kept, "architectures": [architecture_table().text_models[kind]], "model_type": kind})


def random_model_config(rng: random.Random) -> dict[str, Json]:
    """The config.json of a model type, with up to two values of another kind."""
    kind = rng.choice(KINDS)
    config: dict[str, Json] = json.loads(sound_config(kind))
    fields = {**config_table().base, **config_table().fields[kind]}
    for key in rng.sample(sorted({*fields, *ALSO_UNDECLARED}), rng.randint(0, 2)):
        config[key] = rng.choice(JSON)
    return {**config, "model_type": kind}


FACTORS: tuple[Json, ...] = (0.5, 1.0, 1, True, 1.01, 0.99, 0, 2.0)
LAYERS = ("full_attention", "sliding_attention", "linear_attention", "other")


def random_positions(rng: random.Random) -> dict[str, Json]:
    """The config.json of a model type with heads of an odd size, most of them, and other rotary positions."""
    config: dict[str, Json] = json.loads(sound_config(rng.choice(KINDS)))
    config["head_dim"] = rng.choice((35, 35, 35, 64, 3))
    if "qk_rope_head_dim" in config and rng.random() < 0.5:
        config["qk_rope_head_dim"] = 35
    if (draw := rng.random()) < 0.6:
        config["rope_parameters"] = _positions(rng)
    elif draw < 0.75:
        config.pop("rope_parameters", None)
    if rng.random() < 0.2:
        config["rope_scaling"] = _positions(rng)
    if rng.random() < 0.3:
        config["partial_rotary_factor"] = rng.choice(FACTORS)
    if rng.random() < 0.2:
        config["rope_theta"] = 1e4
    layers = config.get("num_hidden_layers")
    if (draw := rng.random()) < 0.3:
        config.pop("layer_types", None)
    elif draw < 0.6 and isinstance(layers, int):
        config["layer_types"] = [rng.choice(LAYERS[:2]) for _ in range(layers)]
    return config


def _positions(rng: random.Random) -> Json:
    """One description, one for each of some kinds of layers, an empty one or none."""
    if (draw := rng.random()) < 0.15:
        return None if draw < 0.1 else {}
    if draw < 0.5:
        return _one(rng)
    return {kind: _one(rng) if rng.random() < 0.9 else None for kind in rng.sample(LAYERS, rng.randint(1, 3))}


def _one(rng: random.Random) -> dict[str, Json]:
    one: dict[str, Json] = {"rope_type": "default"}
    if rng.random() < 0.2:
        one = {"rope_type": "linear", "factor": 2.0}
    return one if rng.random() < 0.4 else {**one, "partial_rotary_factor": rng.choice(FACTORS)}


def config_disagreement(config: dict[str, Json]) -> str | None:
    """Where transformers refuses what vexport takes, or vexport names a type that transformers takes."""
    kind = str(config["model_type"])
    name = architecture_table().text_models[kind]
    types = [*wrong_types(kind, config)]
    ours = bool(types)
    if name in decoders():
        ours = ours or bool([*wrong_settings(config)] or missing_sizes(name, config))
    try:
        with warnings.catch_warnings(action="ignore"), time_limit(MOST_SECONDS, "processor"):
            CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(config)))
    except Exception as error:
        if isinstance(error, TimeoutError) and config.get("num_hidden_layers") in MANY:
            return None  # of so many layers `check` asks for tensors, before it looks at a config
        return None if ours else f"{config}: transformers refuses ({error!r:.300}), vexport takes it"
    own = [setting for setting in types if not _is_stricter(kind, setting, config)]
    return f"{config}: transformers takes it, vexport {own}" if own else None


def _is_stricter(kind: str, setting: WrongSetting, config: dict[str, Json]) -> bool:
    """What vexport refuses on purpose: types that transformers only reads, and sizes below 1."""
    key, value = setting.key, config.get(setting.key)
    if key in ALSO_UNDECLARED and not (key in config_table().fields[kind] and isinstance(value, list | dict)):
        return True
    return key in config_table().base or (key in SIZES and type(value) is int and value < 1)
