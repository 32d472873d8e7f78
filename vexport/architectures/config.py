"""Compute sizes from a model's config.json with the expressions of the generated tables.

Expressions are Python. They contain keys of config.json (`text_config.hidden_size`), whole numbers
and words. `i` is the number of a layer, `layers` the number of layers. Expressions for the parts of
merged layers (scripts/model_classes.py) may also use `queries`, `keys` and `values` of attention.
Only expressions in this package's tables are evaluated. They only have access to the values of a
config.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

from vexport.architectures import Architecture
from vexport.errors import InputError
from vexport.records import Json
from vexport.rules.architecture import VOCAB_SIZE

# Keys of nested configs. text_config: most models. llm_config: InternVL, Nemotron VL and NVLM,
# where vLLM reads it as text_config (_CONFIG_ATTRS_MAPPING in transformers_utils/config.py).
# language_config: DeepSeek-VL2. thinker_config: Qwen Omni and Qwen3-ASR, around another text_config
# (`get_text_config` of their configs).
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# Keys with the number of routed experts of a layer.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Largest number in a config that is accepted as a dimension of a tensor.
LARGEST = 1 << 40
# Words in expressions for the parts of merged layers: the out_features of the projections.
QUERIES, KEYS, VALUES = "queries", "keys", "values"


def text_config(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the part of a config.json that describes the language model.

    For a text model this is the whole config.
    """
    nested = (config.get(key) for key in TEXT_CONFIGS)
    inner = next((value for value in nested if isinstance(value, dict)), None)
    return config if inner is None else text_config(inner)


def vocab_size(config: Mapping[str, Json], where: str) -> int:
    """Return a model's number of token ids. Raises InputError at `where` if the config lacks it."""
    size = text_config(config).get("vocab_size")
    if isinstance(size, int):
        return size
    raise InputError.of(VOCAB_SIZE, where)


class Unknown(Exception):
    """A value cannot be computed from a config."""


class Items:
    """String or list from a config, for use in expressions.

    Unlike str and list, it does not support multiplication, so an expression cannot create a huge
    value from it.
    """

    def __init__(self, values: str | list[Json]) -> None:
        self.values = values

    def __getitem__(self, number: int) -> object:
        if not 0 <= number < len(self.values):
            raise Unknown(f"number {number} of {len(self.values)}")
        return wrapped(self.values[number])

    def __contains__(self, value: Json) -> bool:
        return value in [*self.values]

    def __eq__(self, other: object) -> bool:
        return self.values == (other.values if isinstance(other, Items) else other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.values)


def wrapped(value: Json) -> object:
    """Return a value of a config for use in expressions.

    Strings and lists are returned as `Items`. Raises Unknown for an object, and for a number that
    is too large for a size.
    """
    if isinstance(value, str | list):
        return Items(value)
    if isinstance(value, dict) or isinstance(value, int) and abs(value) > LARGEST:
        raise Unknown(repr(value)[:80])
    return value


def evaluate(
    expression: str, values: Mapping[str, object], *, i: int = -1, layers: int = -1
) -> object:
    """Return the value of an expression. Raises Unknown if it cannot be computed from `values`."""
    known = {"__builtins__": {}, "len": len, "i": i, "layers": layers}
    try:
        return eval(_compiled(expression), known, values)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        NameError,
        SyntaxError,
    ) as error:
        raise Unknown(f"{expression}: {error}") from error


def size(expression: str, values: Mapping[str, object], *, i: int = -1, layers: int = -1) -> int:
    """Return the value of an expression as a whole number.

    Raises Unknown if it is negative, not a whole number, or cannot be computed.
    """
    value = evaluate(expression, values, i=i, layers=layers)
    if not isinstance(value, int) or value < 0:
        raise Unknown(f"{expression}: {value!r}")
    return int(value)


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<table>", "eval")


def part_sizes(
    layer: str, rows: int, architecture: Architecture, text: Mapping[str, Json]
) -> tuple[int, ...]:
    """Return the out_features of each part of a merged layer.

    `layer` is the last part of the layer's name, and `rows` are the out_features of the merged
    layer. Returns () if the sizes are unknown or do not add up to `rows`.
    """
    expressions = architecture.parts.get(layer, ())
    if len({*expressions}) == 1 and rows % len(expressions) == 0:
        return (rows // len(expressions),) * len(expressions)
    queries = query_rows(text)
    attention = {QUERIES: queries, KEYS: (rows - queries) // 2, VALUES: (rows - queries) // 2}
    sizes = tuple(known_size(expression, {**text, **attention}) for expression in expressions)
    return sizes if sum(sizes) == rows and min(sizes, default=0) > 0 else ()


def query_rows(text: Mapping[str, Json]) -> int:
    """Return the out_features of the query projection (heads times head width), or 0 if unknown."""
    return head_width(text) * known_size("num_attention_heads", text)


def head_width(text: Mapping[str, Json]) -> int:
    """Return the number of columns of an attention head, or 0 if it is unknown."""
    return known_size("head_dim", text) or known_size("hidden_size // num_attention_heads", text)


def known_size(expression: str, values: Mapping[str, Json]) -> int:
    """Return the value of an expression, or 0 if it cannot be computed.

    A key counts as 0 if it is missing or its value is not a valid size.
    """
    sizes = {
        key: value
        for key, value in values.items()
        if isinstance(value, int) and 0 < value <= LARGEST
    }
    try:
        return size(expression, defaultdict(int, sizes))
    except Unknown:
        return 0
