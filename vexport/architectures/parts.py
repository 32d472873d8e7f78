"""The sizes of the parts of layers that vLLM merges, as functions of the model's config.

The expressions come with the table (scripts/output_sizes.py): keys of config.json, `queries`, `keys` and
`values` for those of attention, whole numbers, `+ - * //`, and `a or b`, which is b where there is no a.
"""

from collections import defaultdict
from collections.abc import Mapping

from vexport.architectures.expressions import Unknown, size
from vexport.architectures.table import Architecture
from vexport.records import Json

QUERIES, KEYS, VALUES = "queries", "keys", "values"


def part_sizes(
    layer: str, rows: int, architecture: Architecture, text: Mapping[str, Json]
) -> tuple[int, ...]:
    """The out_features of the parts of a layer of so many, by the last part of its name; none where they are
    not known or not these."""
    expressions = architecture.parts.get(layer, ())
    if len({*expressions}) == 1 and rows % len(expressions) == 0:
        return (rows // len(expressions),) * len(expressions)
    queries = query_rows(text)
    attention = {QUERIES: queries, KEYS: (rows - queries) // 2, VALUES: (rows - queries) // 2}
    sizes = tuple(evaluate(expression, {**text, **attention}) for expression in expressions)
    return sizes if sum(sizes) == rows and min(sizes, default=0) > 0 else ()


def query_rows(text: Mapping[str, Json]) -> int:
    """Heads times their width; 0 where the config does not tell."""
    width = evaluate("head_dim", text) or evaluate("hidden_size // num_attention_heads", text)
    return width * evaluate("num_attention_heads", text)


def evaluate(expression: str, values: Mapping[str, Json]) -> int:
    """A size; 0 where the config does not tell."""
    sizes = {key: value for key, value in values.items() if isinstance(value, int) and value > 0}
    try:
        return size(expression, defaultdict(int, sizes))
    except Unknown:
        return 0
