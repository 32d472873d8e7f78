"""Types of config.json's values, as transformers' own config of the model type has them.

transformers 5 refuses a value of another type (`strict` in huggingface_hub/dataclasses.py), and with it vLLM
does.
"""

import re
from collections.abc import Iterator, Mapping

from vexport.architectures.configs import config_table
from vexport.checks.vllm.decoder import SIZES
from vexport.checks.vllm.rotary import LINEAR, odd_heads
from vexport.checks.vllm.settings import WrongSetting
from vexport.types import Json

# Keys of which other checks say what is wrong with them, of any type.
JUDGED_ELSEWHERE = ("architectures", "dtype")
# Looked into whether a config declares them or not.
READ_OF_ALL = {"layer_types": ("list", "None"), "rope_parameters": ("dict", "None")}
# Whose config refuses a hidden size that heads do not divide, also with a head_dim (validate_architecture).
DIVIDED = frozenset(
    {"deepseek_v2", "gemma2", "gemma3_text", "gemma3n_text", "hrm_text", "hyperclovax", "llama", "minicpm3"}
)
# Whose positions are of few types (validate_rope), and whose layers must be of both kinds.
LONG_ROPE, LONG_ROPES = frozenset({"phi3"}), ("default", "longrope", "su", "yarn")
MIXED = frozenset({"olmo_hybrid"})
# Whose layer_types may be left out, but not be null.
LISTED = frozenset({"nemotron_h"})
# ALLOWED_MLP_LAYER_TYPES of transformers' configuration_utils.py.
MLP_KINDS = ("sparse", "dense")
# Whose config makes `layer_types` as long as there are layers.
COMPLETED = frozenset({"deepseek_v4"})
# Whose config bounds initializer_range (an `interval`).
SPREAD = frozenset({"hrm_text", "llama", "olmo_hybrid"})
NUMBER = re.compile(r"\s*[+-]?\d+(_\d+)*\s*")
TYPES: Mapping[str, type] = {
    "None": type(None),
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
}


def wrong_types(kind: str, config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """Values of another type than the fields of a model type have."""
    table = config_table()
    fields = {**READ_OF_ALL, **table.base, **table.fields.get(kind, {})}
    for key, types in fields.items():
        if key in config and key not in JUDGED_ELSEWHERE and not _fits(config[key], types):
            yield WrongSetting(key=key, expected=" | ".join(types), got=repr(config[key]))
    yield from _layer_types(kind, config)
    yield from _values(kind, config)


def _values(kind: str, config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """What transformers' validators refuse of values that have the right type."""
    labels = config.get("id2label")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    spread = config.get("initializer_range", 0.0)
    for key in SIZES:
        if type(size := config.get(key)) is int and size < 1:
            yield WrongSetting(key=key, expected="a size", got=str(size))
    if kind in SPREAD and isinstance(spread, float) and not 0 <= spread <= 1:
        yield WrongSetting(key="initializer_range", expected="from 0 to 1", got=repr(spread))
    if isinstance(labels, dict) and not all(NUMBER.fullmatch(key) for key in labels):
        yield WrongSetting(key="id2label", expected="numbers as keys", got=", ".join(map(repr, labels)))
    yield from odd_heads(kind, config)
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if kind in LONG_ROPE and rope_type not in LONG_ROPES:
        yield WrongSetting(key="rope_parameters", expected="default or longrope", got=repr(rope_type))
    listed = config.get("layer_types")
    if kind in MIXED and isinstance(listed, list) and LINEAR not in listed:
        yield WrongSetting(key="layer_types", expected=f"at least one {LINEAR}", got="none")
    if kind in DIVIDED and type(width) is int and type(heads) is int and heads > 0 and width % heads:
        expected = f"a multiple of num_attention_heads {heads}"
        yield WrongSetting(key="hidden_size", expected=expected, got=str(width))


def _layer_types(kind: str, config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """One known kind of attention, and of MLP, for each layer (validate_layer_type)."""
    if kind in COMPLETED:
        return
    has_types = "layer_types" in config_table().fields.get(kind, {}) or config.get("layer_types") is not None
    if kind in LISTED and config.get("layer_types", []) is None:
        yield WrongSetting(key="layer_types", expected="a list", got="None")
    yield from _one_each("layer_types", config_table().layer_kinds, config)
    if has_types:
        yield from _one_each("mlp_layer_types", MLP_KINDS, config)


def _one_each(key: str, kinds: tuple[str, ...], config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    stored, layers = config.get(key), config.get("num_hidden_layers")
    if not isinstance(stored, list):
        return
    for unknown in sorted({str(each) for each in stored} - {*kinds}):
        yield WrongSetting(key=key, expected=f"each one of {', '.join(kinds)}", got=unknown)
    if type(layers) is int and layers != len(stored):
        yield WrongSetting(key=key, expected=f"one for each of {layers} layers", got=f"{len(stored)}")


def _fits(value: Json, types: tuple[str, ...]) -> bool:
    """Whether a value is of one of the types, of any where there are none."""
    return not types or any(_is(value, name) for name in types)


def _is(value: Json, name: str) -> bool:
    outer, _, inner = name.rstrip("]").partition("[")
    if not isinstance(value, TYPES[outer]) or (outer == "int" and isinstance(value, bool)):
        return False
    return not isinstance(value, list) or inner not in TYPES or all(_is(each, inner) for each in value)
