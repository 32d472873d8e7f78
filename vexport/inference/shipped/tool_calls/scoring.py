"""Compare the calls in a response with the expected call."""

import json
from collections.abc import Mapping, Sequence

from vexport.inference.shipped.base import CORRECT, JsonObject
from vexport.inference.shipped.tool_calls.tools import name_of, parameters_of, schema_problem
from vexport.inference.stored_responses import FinishedText
from vexport.records import Json

_CUT = "length"


def score_calls(
    tools: Sequence[JsonObject], expected: Mapping[str, Json], response: FinishedText
) -> dict[str, float]:
    """Return the metrics of a response. If it has several calls, the first is compared.

    Such a response is not correct, whatever its first call is.
    """
    name, arguments = "", None
    if response.calls:
        name = response.calls[0].name
        arguments = parsed_arguments(response.calls[0].arguments)
    schemas = {name_of(tool): parameters_of(tool) for tool in tools}
    is_object = isinstance(arguments, dict)
    fits = is_object and not (name in schemas and schema_problem(arguments, schemas[name]))
    has_name = name == expected["name"]
    is_equal = is_object and same_json(arguments, expected["arguments"])
    is_right = fits and has_name and is_equal and len(response.calls) == 1
    return {
        CORRECT: float(is_right),
        "well_formed": float(fits),
        "right_tool": float(has_name),
        "equal_arguments": float(is_equal),
        "complete": float(response.finish_reason != _CUT),
    }


def parsed_arguments(text: str) -> Json:
    """Return the arguments as JSON, or None if they are not JSON. No arguments are an empty object.

    Some models write nothing for a tool without parameters.
    """
    if not text.strip():
        return {}
    try:
        value: Json = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(name: str) -> None:
    raise ValueError(name)


def same_json(value: Json, other: Json) -> bool:
    """Return True for equal JSON values. 1 equals 1.0, but not true. Objects have no order."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            same_json(value[key], other[key]) for key in value
        )
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same_json, value, other))
    return value == other
