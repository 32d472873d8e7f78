"""Sizes that a model's config.json tells: its language part, and expressions of the generated
tables.

Expressions are Python: keys of config.json (`text_config.hidden_size`), `i` for the number of a
layer of `layers`, whole numbers and words; those of the parts of merged layers
(scripts/model_classes.py) also know `queries`, `keys` and `values` of attention. Only what comes
with the package is evaluated, and reaches a config's values alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

from vexport.architectures import Architecture
from vexport.errors import InputError
from vexport.records import Json

# Keys of nested configs: of most models; of InternVL, Nemotron VL and NVLM, which vLLM reads as
# text_config (_CONFIG_ATTRS_MAPPING in transformers_utils/config.py); of DeepSeek-VL2; of Qwen Omni
# and Qwen3-ASR, around another text_config (`get_text_config` of their configs).
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# Keys that count the routed experts of a layer.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# No tensor is made of larger numbers.
LARGEST = 1 << 40
# Characters of a value in a message, and whole numbers that are shown in short.
SHOWN, LONG, LARGEST_FLOAT = 80, 10**9, 10**300
QUERIES, KEYS, VALUES = "queries", "keys", "values"


def text_config(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """The part of a config.json that describes the language model: the whole of it for a text
    model.
    """
    nested = (config.get(key) for key in TEXT_CONFIGS)
    inner = next((value for value in nested if isinstance(value, dict)), None)
    return config if inner is None else text_config(inner)


def vocab_size(config: Mapping[str, Json], where: str) -> int:
    """Return the number of token ids that a model knows; InputError at `where` if it is missing."""
    size = text_config(config).get("vocab_size")
    if isinstance(size, int):
        return size
    raise InputError(
        where,
        got="no vocab_size",
        need="the number of tokens",
        fix="restore the model's config.json",
    )


def shown(value: Json) -> str:
    """Return a value of a config as messages show it: at most 80 characters, large numbers in
    short.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LONG:
        # A float holds no larger numbers; Python refuses to write out numbers of thousands of
        # digits.
        return (
            f"{value:.6g}"
            if abs(value) < LARGEST_FLOAT
            else f"a number of {value.bit_length()} bits"
        )
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


class Unknown(Exception):
    """A config does not tell."""


class Items:
    """A word or a list of a config: no number, so that nothing is multiplied by it."""

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
    """A value of a config as expressions see it. Raises Unknown for what is no size."""
    if isinstance(value, str | list):
        return Items(value)
    if isinstance(value, dict) or isinstance(value, int) and abs(value) > LARGEST:
        raise Unknown(repr(value)[:80])
    return value


def evaluate(
    expression: str, values: Mapping[str, object], *, i: int = -1, layers: int = -1
) -> object:
    """The value of an expression. Raises Unknown where the values do not tell."""
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
    """A whole number that is not negative. Raises Unknown."""
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
    """The out_features of the parts of a layer of so many, by the last part of its name; none where
    they are not known or not these."""
    expressions = architecture.parts.get(layer, ())
    if len({*expressions}) == 1 and rows % len(expressions) == 0:
        return (rows // len(expressions),) * len(expressions)
    queries = query_rows(text)
    attention = {QUERIES: queries, KEYS: (rows - queries) // 2, VALUES: (rows - queries) // 2}
    sizes = tuple(known_size(expression, {**text, **attention}) for expression in expressions)
    return sizes if sum(sizes) == rows and min(sizes, default=0) > 0 else ()


def query_rows(text: Mapping[str, Json]) -> int:
    """Heads times their width; 0 where the config does not tell."""
    return head_width(text) * known_size("num_attention_heads", text)


def head_width(text: Mapping[str, Json]) -> int:
    """Columns of an attention head; 0 where the config does not tell."""
    return known_size("head_dim", text) or known_size("hidden_size // num_attention_heads", text)


def known_size(expression: str, values: Mapping[str, Json]) -> int:
    """A size; 0 where the config does not tell."""
    sizes = {
        key: value
        for key, value in values.items()
        if isinstance(value, int) and 0 < value <= LARGEST
    }
    try:
        return size(expression, defaultdict(int, sizes))
    except Unknown:
        return 0
