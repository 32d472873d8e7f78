"""Make values that fit a JSON schema, at random."""

from collections.abc import Callable, Mapping
from math import isfinite
from random import Random
from typing import NamedTuple

from vexport.inference.shipped.base import JsonObject
from vexport.records import Json

# Optional values below this depth are left out. A schema may refer to itself.
_MOST_LEVELS = 4
# A longer list or text does not fit in a response.
_MOST_ITEMS = 100
_MOST_CHARACTERS = 1000
_WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "iris", "juniper"),
    *("kestrel", "lagoon", "maple", "nectar", "orchid", "pebble", "quartz", "river", "saffron"),
    *("tulip", "umber", "violet", "willow", "yarrow", "zephyr", "basil", "coral", "dune", "fern"),
)
_CITIES = (
    "Lisbon",
    "Oslo",
    "Kyoto",
    "Quito",
    "Dakar",
    "Porto",
    "Turin",
    "Leeds",
    "Cusco",
    "Bergen",
)
_PEOPLE = ("Ana Lopez", "Ben Okafor", "Chloe Martin", "Dev Patel", "Emma Berg", "Felix Wong")


class _Place(NamedTuple):
    """The key of a value, and its depth in the arguments."""

    key: str
    level: int


class CannotMake(Exception):
    """A schema that no value is known for."""


class ValueMaker:
    """Makes values for parts of the schema `root`, with the random numbers of `chooser`."""

    def __init__(self, root: JsonObject, chooser: Random) -> None:
        self._root = root
        self._chooser = chooser

    def arguments(self) -> dict[str, Json]:
        """Return arguments with all required parameters and about half of the others.

        Raises CannotMake if a required parameter has a schema that no value is known for.
        """
        try:
            made = self._make(dict(self._root), _Place("", 0))
        except OverflowError:
            raise CannotMake("a limit that is too large for a number") from None
        if not isinstance(made, dict):
            raise CannotMake("the schema is not that of an object")
        return made

    def _make(self, schema: Json, place: _Place) -> Json:
        if not isinstance(schema, Mapping):
            return self._word()
        return self._made(self._resolved(schema), place)

    def _made(self, schema: JsonObject, place: _Place) -> Json:
        if place.level > 2 * _MOST_LEVELS:
            raise CannotMake("the schema refers to itself without an end")
        if "const" in schema:
            return schema["const"]
        for key in ("enum", "examples"):
            values = schema.get(key)
            if isinstance(values, list) and values:
                return self._chooser.choice(values)
        makers: dict[str, Callable[[JsonObject, _Place], Json]] = {
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda *_: self._chooser.random() < 0.5,
            "null": lambda *_: None,
        }
        return makers.get(_type_of(schema), self._text)(schema, place)

    def _resolved(self, schema: JsonObject) -> JsonObject:
        """Return the schema with local references, `allOf` and the first real option merged in."""
        for _ in range(2 * _MOST_LEVELS):
            reference = schema.get("$ref")
            options = schema.get("anyOf") or schema.get("oneOf")
            every = schema.get("allOf")
            if isinstance(reference, str):
                schema = _merged(_without(schema, "$ref"), self._pointed(reference))
            elif isinstance(options, list):
                real = [each for each in options if isinstance(each, Mapping)]
                chosen = next((each for each in real if each.get("type") != "null"), {})
                schema = _merged(_without(schema, "anyOf", "oneOf"), chosen)
            elif isinstance(every, list):
                rest = _without(schema, "allOf")
                for each in every:
                    rest = _merged(rest, each if isinstance(each, Mapping) else {})
                schema = rest
            else:
                return schema
        raise CannotMake("the schema refers to itself without an end")

    def _pointed(self, reference: str) -> JsonObject:
        target: Json = dict(self._root)
        if reference != "#" and not reference.startswith("#/"):
            raise CannotMake(f"the reference {reference} leads out of the schema")
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise CannotMake(f"the reference {reference} leads to nothing")
        return target

    def _object(self, schema: JsonObject, place: _Place) -> dict[str, Json]:
        properties = schema.get("properties")
        listed = schema.get("required")
        required = listed if isinstance(listed, list) else []
        made: dict[str, Json] = {}
        for key, inner in properties.items() if isinstance(properties, Mapping) else ():
            is_required = key in required
            is_chosen = self._chooser.random() < 0.5 and place.level < _MOST_LEVELS
            if is_required or is_chosen:
                try:
                    made[key] = self._make(inner, _Place(key, place.level + 1))
                except CannotMake:
                    if is_required:
                        raise
        return made

    def _array(self, schema: JsonObject, place: _Place) -> list[Json]:
        least = _whole(schema.get("minItems"), min(1, _whole(schema.get("maxItems"), 1)))
        if least > _MOST_ITEMS:
            raise CannotMake(f"a list of at least {least:,} items, more than {_MOST_ITEMS}")
        most = max(least, min(_whole(schema.get("maxItems"), least + 2), least + 2))
        made: list[Json] = []
        inner = _Place(place.key, place.level + 1)
        prefix = schema.get("prefixItems")
        if isinstance(prefix, list):
            return [self._make(each, inner) for each in prefix]
        for _ in range(self._chooser.randint(least, most)):
            value = self._make(schema.get("items", {}), inner)
            if value not in made or not schema.get("uniqueItems"):
                made.append(value)
        return made

    def _integer(self, schema: JsonObject, place: _Place) -> int:
        low, high = _range(schema, 1, 60)
        step = _whole(schema.get("multipleOf"), 1) or 1
        first = -(-int(low) // step)
        return self._chooser.randint(first, max(first, int(high) // step)) * step

    def _number(self, schema: JsonObject, place: _Place) -> float:
        low, high = _range(schema, 1, 60)
        step = schema.get("multipleOf")
        if isinstance(step, int | float) and step > 0:
            first = int(low // step) + 1
            made = float(self._chooser.randint(first, max(first, int(high // step))) * step)
        else:
            made = round(self._chooser.uniform(low, high), 1)
        if not isfinite(made):
            raise OverflowError
        return made

    def _text(self, schema: JsonObject, place: _Place) -> str:
        made = self._formatted(str(schema.get("format")), place.key.lower())
        least, most = _whole(schema.get("minLength"), 0), _whole(schema.get("maxLength"), 1 << 16)
        if least > _MOST_CHARACTERS:
            raise CannotMake(
                f"a text of at least {least:,} characters, more than {_MOST_CHARACTERS:,}"
            )
        while len(made) < least:
            made = f"{made} {self._word()}"
        return made[:most]

    def _formatted(self, format_: str, key: str) -> str:
        draw = self._chooser.randint
        date = f"2027-{draw(1, 12):02}-{draw(1, 28):02}"
        time = f"{draw(8, 18):02}:{draw(0, 59):02}:00"
        texts = {
            "date": date,
            "time": f"{time}Z",
            "date-time": f"{date}T{time}Z",
            "email": f"{self._word()}@example.com",
            "uri": f"https://example.com/{self._word()}",
            "uuid": f"{draw(0, 16**8 - 1):08x}-0000-4000-8000-{draw(0, 16**12 - 1):012x}",
            "ipv4": f"192.0.2.{draw(1, 254)}",
        }
        if format_ in texts:
            return texts[format_]
        if key.endswith("id"):
            return f"{self._word()[:2].upper()}-{draw(1000, 9999)}"
        if "city" in key or "place" in key:
            return self._chooser.choice(_CITIES)
        if "name" in key or "person" in key:
            return self._chooser.choice(_PEOPLE)
        return f"{self._word()} {self._word()}"

    def _word(self) -> str:
        return self._chooser.choice(_WORDS)


def _type_of(schema: JsonObject) -> str:
    """Return the type of a schema. If it has several, the first that is not null."""
    stated = schema.get("type")
    types = stated if isinstance(stated, list) else [stated]
    real = [each for each in types if isinstance(each, str) and each != "null"]
    if real:
        return real[0]
    if stated is not None:
        return "null"
    return "object" if "properties" in schema else "array" if "items" in schema else "string"


def _merged(schema: JsonObject, other: JsonObject) -> JsonObject:
    """Return the keys of both schemas. Properties and required keys are joined."""
    merged: dict[str, Json] = {**other, **schema}
    for key in ("properties", "required"):
        old, new = other.get(key), schema.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            merged[key] = {**old, **new}
        if isinstance(old, list) and isinstance(new, list):
            merged[key] = [*old, *new]
    return merged


def _without(schema: JsonObject, *keys: str) -> JsonObject:
    return {key: value for key, value in schema.items() if key not in keys}


def _whole(value: Json, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _range(schema: JsonObject, low: float, high: float) -> tuple[float, float]:
    """Return the smallest and the largest allowed number. One missing bound follows the other."""
    width = high - low
    bounds = [
        _bound(schema, "minimum", "exclusiveMinimum", 1),
        _bound(schema, "maximum", "exclusiveMaximum", -1),
    ]
    least, most = bounds
    if least is None and most is None:
        return low, high
    if least is None:
        assert most is not None
        return (low, most) if most >= low else (most - width, most)
    return least, least + width if most is None else most


def _bound(schema: JsonObject, name: str, exclusive: str, step: int) -> float | None:
    value, outer = schema.get(name), schema.get(exclusive)
    if isinstance(outer, int | float) and not isinstance(outer, bool):
        # Whole numbers are most common. A narrower range is tried again.
        return float(outer) + step
    return float(value) if isinstance(value, int | float) else None
