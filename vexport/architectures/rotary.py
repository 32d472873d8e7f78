"""Rotary position embeddings of a config.json as vLLM builds them: bases and sizes of their tables.

Source: get_rope in vllm/model_executor/layers/rotary_embedding/__init__.py and the classes that it
makes. A table has a row of `rotary_dim` values for each position.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from vexport.architectures.config import head_width, known_size
from vexport.records import Json

# Endings of the keys of a base: rope_theta (also local_rope_theta), and older names.
BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
# Keys with the share of a head that is rotated.
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")
# Keys with the parameters of the position embeddings. rope_scaling is the older name.
DESCRIPTIONS = ("rope_parameters", "rope_scaling")
ORIGINAL = "original_max_position_embeddings"
# Values of rope_type with a table that is `factor` times as long as the number of original
# positions (OF_ORIGINAL) or the number of all positions (OF_ALL).
OF_ORIGINAL = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
OF_ALL = ("linear", "ntk", "dynamic")
# Number of rows for each position if the config has sections for an image's height and width
# (mrope_section, MRotaryEmbedding).
SECTIONS = 4
# Larger numbers of positions are replaced by this number, to limit the size of computed numbers.
LARGEST = 1 << 62
# Limit of nesting. Dictionaries nested more deeply are not searched.
DEEPEST = 6


# Values that a version of transformers accepts, by model type and key.
AcceptedValues = Mapping[str, Mapping[str, Sequence[float]]]


def wrong_numbers(
    config: Mapping[str, Json], accepted: AcceptedValues
) -> Iterator[tuple[str, Json]]:
    """Yield the key and value of invalid RoPE bases and of invalid shares of a rotated head.

    A base must be finite and above zero. A share must be above zero and at most 1. A value that
    transformers accepts for the model type is valid, for example 0 for a layer without positions.
    """
    return _wrong_numbers(config, accepted, known={}, path="", depth=0)


def _wrong_numbers(
    config: Mapping[str, Json],
    accepted: AcceptedValues,
    *,
    known: Mapping[str, Sequence[float]],
    path: str,
    depth: int,
) -> Iterator[tuple[str, Json]]:
    """Yield the invalid values of a config inside another config.

    `known` are the values that the outer config's model type accepts.
    """
    known = {**known, **accepted.get(str(config.get("model_type")), {})}
    for key, value in config.items():
        if isinstance(value, dict):
            if depth < DEEPEST:
                yield from _wrong_numbers(
                    value, accepted, known=known, path=f"{path}{key}.", depth=depth + 1
                )
        elif (key.endswith(BASES) or key in PARTIAL) and refused_values(key, value, known):
            yield f"{path}{key}", value


def refused_values(key: str, value: Json, known: Mapping[str, Sequence[float]]) -> list[Json]:
    """Return the values of a RoPE key that are invalid, except `known` values of the key.

    A base may be a list with a value for each layer.
    """
    most = 1.0 if key in PARTIAL else math.inf
    values = value if isinstance(value, list) and key not in PARTIAL else [value]
    refused = [each for each in values if not _is_between(each, most)]
    return [each for each in refused if isinstance(each, bool) or each not in known.get(key, ())]


def _is_between(value: Json, most: float) -> bool:
    """Return True if a value is null, or a finite number above zero that is at most `most`."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    number = _as_float(value)
    return 0 < number <= most and math.isfinite(number)


def table_bytes(text: Mapping[str, Json]) -> int:
    """Return the maximum size of a table of positions, in bytes.

    Each row is assumed to have the full width of a head. If only a share of the head is rotated,
    the table is smaller. Returns 0 if the config lacks the number of positions or the width of a
    head.
    """
    positions = _whole(text.get("max_position_embeddings"))
    width = known_size("qk_rope_head_dim", text) or head_width(text)
    size = 4 if text.get("dtype", text.get("torch_dtype")) in ("float32", "torch.float32") else 2
    rows = max((_rows(each, positions) for each in _descriptions(text)), default=positions)
    return min(rows, LARGEST) * width * size


def _descriptions(text: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
    """Yield the descriptions of the position embeddings in the config, after an empty description.

    In newer configs, each kind of layer may have a description.
    """
    yield {}
    for key in DESCRIPTIONS:
        found = text.get(key)
        if isinstance(found, dict):
            yield found
            yield from (inner for inner in found.values() if isinstance(inner, dict))


def _rows(rope: Mapping[str, Json], positions: int) -> int:
    kind = rope.get("rope_type", rope.get("type"))
    original = _whole(rope.get(ORIGINAL)) or positions
    if "mrope_section" in rope:
        positions, original = SECTIONS * positions, SECTIONS * original
    if kind in OF_ORIGINAL:
        return _times(original, rope.get("factor"))
    if kind in OF_ALL and "alpha" not in rope:
        return _times(positions, rope.get("factor"))
    return positions + original if kind == "longrope" else positions


def _times(rows: int, factor: Json) -> int:
    """Return the rows times a factor. If `factor` is a list, the largest factor is used."""
    factors = factor if isinstance(factor, list) else [factor]
    known = [_as_float(each) for each in factors if isinstance(each, int | float)]
    most = max((each for each in known if each > 0), default=1.0)
    return int(min(rows * most, LARGEST))


def _whole(value: Json) -> int:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return min(value, LARGEST) if is_size and isinstance(value, int) else 0


def _as_float(value: int | float) -> float:
    """Return a number as float, or infinity if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
