"""Heads whose rotary positions take all of them must have an even size.

As transformers reads positions (convert_rope_params_to_dict, nested_rope_parameter_keys and validate_rope of
modeling_rope_utils.py), with what config classes do otherwise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from vexport.architectures.configs import config_table
from vexport.checks.vllm.settings import WrongSetting
from vexport.types import Json

# Heads of test checkpoints may be odd up to this size.
LARGEST_ODD = 4
# Whose layers have heads of several sizes.
HETEROGENEOUS = frozenset({"gemma4_text"})
# Of latent attention, whose config takes it for head_dim.
LATENT = "qk_rope_head_dim"
FACTOR = "partial_rotary_factor"
# Whose positions rotate a part of each head where the config says nothing else.
PARTIAL = frozenset(
    {"glm4", "glm4_moe", "nemotron", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"}
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Kinds of layers of a model type whose config names none; other model types have none then.
ALTERNATING: tuple[str, ...] = (
    "afmoe",
    "cohere2",
    "exaone4",
    "exaone_moe",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
)
ALTERNATING += ("granite_swa", "granitemoe_swa", "mimo_v2_flash")
LAYER_KINDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(ALTERNATING, (FULL, SLIDING)),
    **dict.fromkeys(("lfm2", "qwen2", "qwen2_moe", "qwen3"), (FULL,)),
    **dict.fromkeys(("kimi_linear", "nemotron_h", "olmo_hybrid"), (FULL, LINEAR)),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), (FULL, LINEAR)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ("indexed_attention",)),
    "llama4_text": (FULL, "chunked_attention"),
}
# Which have positions of their own for both kinds, and ignore the factor next to them.
BY_KIND = frozenset({"gemma3_text"})
# Which take positions as they are stored; the default has a factor of a third.
AS_STORED = frozenset({"mimo_v2_flash"})


def odd_heads(kind: str, config: Mapping[str, Json]) -> Iterator[WrongSetting]:
    """The size of a head that is odd where all of it is rotated, and positions that no class reads."""
    given = _dict(config.get("rope_parameters"))
    if kind in BY_KIND and config.get("rope_scaling") and given and FULL not in given:
        got = "none next to rope_scaling"
        yield WrongSetting(key="rope_parameters", expected=f"one with {FULL}", got=got)
    key = _head_key(kind, config)
    head = config.get(key)
    if type(head) is not int or head <= LARGEST_ODD or head % 2 == 0 or kind in HETEROGENEOUS:
        return
    if any(_is_whole(head, factor) for factor in _factors(kind, config)):
        yield WrongSetting(key=key, expected="an even number, as its positions rotate pairs", got=str(head))


def _is_whole(head: int, factor: Json) -> bool:
    """Whether so much of a head is all of it; what is no finite number has no part, and is refused too."""
    if isinstance(factor, float):
        return not math.isfinite(factor) or int(head * factor) == head
    return not isinstance(factor, int) or factor == 1


def _head_key(kind: str, config: Mapping[str, Json]) -> str:
    """The key that says how wide a head is: latent attention overwrites head_dim, if it is a field."""
    fields = config_table().fields.get(kind, {})
    return LATENT if LATENT in fields and ("head_dim" in fields or "head_dim" not in config) else "head_dim"


def _factors(kind: str, config: Mapping[str, Json]) -> Iterator[Json]:
    """The share of a head that is rotated, for each description of positions that is looked at."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    declared = "rope_parameters" in config_table().fields.get(kind, {})
    usual: Json = config.get(FACTOR, 0.5 if kind in PARTIAL else 1.0)
    by_layer = kind in LAYER_KINDS or "layer_types" in config_table().fields.get(kind, {})
    inner: Json = usual if by_layer else 1.0
    rope: Json = old or new
    if kind in BY_KIND:
        first: Json = {**_dict(_dict(new).get(FULL)), **_dict(old)}
        rope, inner, declared = {FULL: first, SLIDING: _dict(new).get(SLIDING) or {}}, 1.0, True
    elif kind in AS_STORED:
        rope, usual, inner, declared = old if "rope_scaling" in config else new, 1.0, 1.0, False
    elif not declared and old and config.get("rope_theta"):
        rope, usual, inner = (new, 1.0, 1.0) if "rope_parameters" in config else (old, usual, usual)
    elif not declared:
        last = [config[key] for key in config if key in ("rope_parameters", "rope_scaling")]
        rope, usual, inner = last[-1] if last else None, 1.0, 1.0
    positions, labels = _dict(rope), _labels(kind, config)
    nested = [one for label, one in positions.items() if label in labels]
    if nested:
        yield from (_dict(one).get(FACTOR, inner) for one in nested if one is not None)
    elif positions or declared:
        yield positions.get(FACTOR, usual)


def _labels(kind: str, config: Mapping[str, Json]) -> Sequence[Json]:
    """The names of layers' kinds, under each of which positions may be described."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    return listed if isinstance(listed, list) else LAYER_KINDS.get(kind, ())


def _dict(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}
