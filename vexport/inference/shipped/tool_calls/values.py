"""Make values that fit a JSON schema, at random.

A schema may have several readings: one for each option of `anyOf` and `oneOf`. The first reading
for which there is a value is used. A schema may refer to itself. Below `_MOST_LEVELS`, the values
with the fewest levels are made, so that they come to an end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, product
from math import ceil, floor, isfinite
from random import Random
from typing import NamedTuple

from vexport.inference.shipped.base import JsonObject
from vexport.records import Json

# Optional values below this depth are left out.
_MOST_LEVELS = 4
# Values below this depth are never made.
_DEEPEST = 2 * _MOST_LEVELS
# A schema with more readings is not searched to the end.
_MOST_READINGS = 64
# Number of schemas that are read in the search for one value.
_MOST_STEPS = 20_000
_ENDLESS = "the schema refers to itself without an end"
_OPTIONS = ("anyOf", "oneOf")
_REFERENCES = ("$ref", "$dynamicRef")
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
    """The key of a value, its depth in the arguments, and the largest depth of values in it."""

    key: str
    level: int
    deepest: int = _DEEPEST

    def inner(self, key: str) -> "_Place":
        return _Place(key, self.level + 1, self.deepest)


class CannotMake(Exception):
    """A schema that no value is known for."""


class ValueMaker:
    """Makes values for parts of the schema `root`, with the random numbers of `chooser`."""

    def __init__(self, root: JsonObject, chooser: Random) -> None:
        from referencing import Registry, Resource
        from referencing.jsonschema import DRAFT202012

        self._root = root
        self._chooser = chooser
        self._steps = 0
        resource = Resource.from_contents(dict(root), default_specification=DRAFT202012)
        self._resolver = Registry().resolver_with_root(resource)

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
        """Make a value for the first reading that has one.

        At `_MOST_LEVELS`, values with fewer levels come before earlier readings.
        """
        if schema is False:
            raise CannotMake("no value is allowed")
        if not isinstance(schema, Mapping):
            return self._word()
        readings = [*islice(self._readings(schema), _MOST_READINGS)]
        is_last = place.level == _MOST_LEVELS
        limits = range(place.level, _DEEPEST + 1) if is_last else (place.deepest,)
        state = self._chooser.getstate()
        reasons = []
        for reading, deepest in ((each, limit) for limit in limits for each in readings):
            try:
                return self._made(reading, place._replace(deepest=deepest))
            except CannotMake as error:
                reasons.append(error)
                self._chooser.setstate(state)
        raise reasons[-1] if reasons else CannotMake(_ENDLESS)

    def _made(self, schema: JsonObject, place: _Place) -> Json:
        self._count_step()
        if place.level > place.deepest:
            raise CannotMake(_ENDLESS)
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

    def _readings(
        self, schema: JsonObject, followed: frozenset[str] = frozenset()
    ) -> Iterator[JsonObject]:
        """Yield the schema with references, `allOf` and one option of each list merged in.

        `followed` has the references that lead to the schema. A reading that would follow one of
        them again has no end, and is left out.
        """
        self._count_step()
        rest = _without(schema, *_REFERENCES, *_OPTIONS, "allOf")
        parts: list[Iterable[JsonObject]] = []
        for name in _REFERENCES:
            reference = schema.get(name)
            if not isinstance(reference, str):
                continue
            if reference in followed:
                return
            target = self._pointed(reference)
            parts.append(self._readings(target, followed | {reference}))
        for name in _OPTIONS:
            if options := _mappings(schema.get(name)):
                parts.append(self._readings_of_options(options, followed))
        parts += [self._readings(each, followed) for each in _mappings(schema.get("allOf"))]
        for chosen in product(*(islice(part, _MOST_READINGS) for part in parts)):
            merged = rest
            for each in chosen:
                merged = _merged(merged, each)
            yield merged

    def _readings_of_options(
        self, options: list[JsonObject], followed: frozenset[str]
    ) -> Iterator[JsonObject]:
        for option in sorted(options, key=lambda each: each.get("type") == "null"):
            yield from self._readings(option, followed)

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise CannotMake(f"no value after {_MOST_STEPS:,} steps")

    def _pointed(self, reference: str) -> JsonObject:
        """Return the schema that a reference leads to. Only parts of the root are found."""
        from referencing.exceptions import Unresolvable

        try:
            target: object = self._resolver.lookup(reference).contents
        except (Unresolvable, ValueError, TypeError):  # a step of text in a list, for example
            raise CannotMake(f"the reference {reference} leads to nothing in the schema") from None
        if target is True:
            return {}
        if not isinstance(target, Mapping):
            raise CannotMake(f"the reference {reference} leads to no schema")
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
                    made[key] = self._make(inner, place.inner(key))
                except CannotMake:
                    if is_required:
                        raise
        return made

    def _array(self, schema: JsonObject, place: _Place) -> list[Json]:
        needed = _whole(schema.get("minItems"), 0)
        least = _whole(schema.get("minItems"), min(1, _whole(schema.get("maxItems"), 1)))
        if least > _MOST_ITEMS:
            raise CannotMake(f"a list of at least {least:,} items, more than {_MOST_ITEMS}")
        most = max(least, min(_whole(schema.get("maxItems"), least + 2), least + 2))
        made: list[Json] = []
        inner = place.inner(place.key)
        items = schema.get("items", {})
        # Before version 2020-12, `items` may be a list.
        prefix = items if isinstance(items, list) else schema.get("prefixItems")
        if isinstance(prefix, list):
            return [self._make(each, inner) for each in prefix]
        for _ in range(self._chooser.randint(least, most)):
            try:
                value = self._make(items, inner)
            except CannotMake:
                if len(made) < needed:
                    raise
                break
            if value not in made or not schema.get("uniqueItems"):
                made.append(value)
        return made

    def _integer(self, schema: JsonObject, place: _Place) -> int:
        low, high = _range(schema, 1, 60)
        step = _whole(schema.get("multipleOf"), 1) or 1
        first = -(-ceil(low) // step)
        return self._chooser.randint(first, max(first, floor(high) // step)) * step

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
    old, new = other.get("properties"), schema.get("properties")
    if isinstance(old, dict) and isinstance(new, dict):
        both: dict[str, Json] = {
            name: {"allOf": [new[name], old[name]]} for name in old if name in new
        }
        merged["properties"] = {**old, **new, **both}
    old, new = other.get("required"), schema.get("required")
    if isinstance(old, list) and isinstance(new, list):
        merged["required"] = [*old, *new]
    return merged


def _mappings(schemas: Json) -> list[JsonObject]:
    """Return the schemas of a list that restrict anything."""
    listed = schemas if isinstance(schemas, list) else []
    return [each for each in listed if isinstance(each, Mapping)]


def _without(schema: JsonObject, *keys: str) -> JsonObject:
    return {key: value for key, value in schema.items() if key not in keys}


def _whole(value: Json, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _range(schema: JsonObject, low: float, high: float) -> tuple[float, float]:
    """Return the smallest and the largest allowed number. One missing bound follows the other.

    Whole numbers stay whole: numbers above 2^53 are not exact as a float.
    """
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
        return outer + step
    return value if isinstance(value, int | float) else None
