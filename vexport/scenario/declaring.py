"""Declare settings: annotations of model fields with help texts and options.

    samples: Annotated[Positive, Option("Number of samples to use.", "Calibration")] = 128

The field defines the setting's name, type, bounds and default. `Key` adds the help text for a key
of scenarios. `Option` also makes the key an option of the command line.
`scripts/generate_settings.py` generates help and the tables in the documents from these fields.
`scripts/generate_schemas.py` generates the JSON schema.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, GetJsonSchemaHandler, JsonValue
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, to_jsonable_python

from vexport.records.options import Heading, OptionRecord, ValueType

_TYPES: Mapping[JsonValue, ValueType] = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "string": "text",
}
_NULL: JsonValue = {"type": "null"}
Schema = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Key:
    """Help text of a key, in Markdown.

    `help` is a sentence. `unset` describes the effect of leaving the key out. `more` appears only
    in the documents.
    """

    help: str
    unset: str = field(default="", kw_only=True)
    more: str = field(default="", kw_only=True)

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of the field with its help as description."""
        return {**handler(core_schema), "description": self.help}


@dataclass(frozen=True, slots=True)
class Option(Key):
    """Help text of a key that is also an option of the command line.

    `heading` is the heading under which help lists the option. By default the option has the key's
    name. `names` replaces it with other names, separated by spaces: `--tp --tensor-parallel-size
    tp`. A last name without dashes is the parameter of the command's function. Without such a name,
    the parameter has the key's name. `metavar` is the option's value in help. `default` is the
    default in command line syntax, if Python's syntax differs.
    """

    heading: Heading
    names: str = field(default="", kw_only=True)
    metavar: str | None = field(default=None, kw_only=True)
    default: str = field(default="", kw_only=True)


def declaration(info: FieldInfo) -> Key | None:
    """Return the `Key` or `Option` of a field, or None for an argument of the Python API only."""
    found = [each for each in info.metadata if isinstance(each, Key)]
    return found[-1] if found else None


def default_value(info: FieldInfo) -> JsonValue:
    """Return the default of a field as JSON, or None if the field is required."""
    if info.is_required():
        return None
    value: JsonValue = to_jsonable_python(info.get_default())
    return value


def options_of(model: type[BaseModel]) -> Iterator[OptionRecord]:
    """Yield the options of the settings of a model, in the order of its fields."""
    properties = model.model_json_schema(mode="serialization")["properties"]
    for key, info in model.model_fields.items():
        declared = declaration(info)
        if isinstance(declared, Option):
            yield _option(key, declared, info, properties[key])


def _option(key: str, declared: Option, info: FieldInfo, schema: Schema) -> OptionRecord:
    own_name = f"--{key}".replace("_", "-")
    value = _without_null(schema)
    items = value.get("items")
    item = items if isinstance(items, dict) else value
    choices = [item["const"]] if "const" in item else item.get("enum")
    low, open_low = item.get("minimum"), item.get("exclusiveMinimum")
    high, open_high = item.get("maximum"), item.get("exclusiveMaximum")
    return OptionRecord(
        key=key,
        names=declared.names.split() or [own_name],
        heading=declared.heading,
        help=_plain(declared.help),
        default=_plain(declared.unset or declared.default or _default_text(default_value(info))),
        metavar=declared.metavar,
        type=_type(item),
        choices=[str(choice) for choice in choices] if isinstance(choices, list) else [],
        low=_number(low if open_low is None else open_low),
        high=_number(high if open_high is None else open_high),
        open_low=open_low is not None,
        open_high=open_high is not None,
        repeatable=isinstance(items, dict),
    )


def _plain(text: str) -> str:
    """Remove backticks around single words. Commands of several words keep them."""
    return re.sub(r"`(\S+)`", r"\1", text)


def _default_text(default: JsonValue) -> str:
    """Return a default in the form of help, or an empty string for false, null, [] and objects."""
    if isinstance(default, bool):
        return "on" if default else ""
    values = default if isinstance(default, list) else [default]
    return ",".join(
        f"{value:g}" if isinstance(value, float) else str(value)
        for value in values
        if isinstance(value, str | int | float)
    )


def _without_null(schema: Schema) -> Schema:
    """Return the schema of a value without the alternative null.

    If several alternatives remain, return the schema of a boolean, or else of a number, or else of
    a list of texts if a text may stand for a list. Otherwise return an empty schema, so that
    `_type` returns `other`.
    """
    alternatives = schema.get("anyOf")
    if not isinstance(alternatives, list):
        return schema
    others = [each for each in alternatives if isinstance(each, dict) and each != _NULL]
    if len(others) == 1:
        return others[0]
    by_type = {each.get("type"): each for each in others}
    if by_type.keys() == {"string", "array"}:
        return {"items": by_type["string"]}
    return by_type.get("boolean") or by_type.get("number") or {}


def _type(schema: Schema) -> ValueType:
    if "enum" in schema or "const" in schema:
        return "choice"
    if schema.get("format") == "path":
        return "path"
    return _TYPES.get(schema.get("type"), "other")


def _number(value: JsonValue) -> float | None:
    return value if isinstance(value, int | float) else None
