"""Sizes and conditions of the generated tables, as functions of a model's config.

They are Python: keys of config.json (`text_config.hidden_size`), `i` for the number of a layer of `layers`,
whole numbers and words. Only what comes with the package is evaluated, and reaches a config's values alone.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

from vexport.records import Json

# No tensor is made of larger numbers.
LARGEST = 1 << 40


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


def evaluate(expression: str, values: Mapping[str, object], *, i: int = -1, layers: int = -1) -> object:
    """The value of an expression. Raises Unknown where the values do not tell."""
    known = {"__builtins__": {}, "len": len, "i": i, "layers": layers}
    try:
        return eval(_compiled(expression), known, values)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NameError, SyntaxError) as error:
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
