"""Tools from a file, and arguments for them."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator

from tests.inference.replying import Sent, replying
from vexport.errors import InputError, InputErrors
from vexport.inference.shipped.base import JsonObject, ShippedPart
from vexport.inference.shipped.tool_calls.questions import (
    DOCUMENTS,
    TOOL_COUNTS,
    arguments_for,
    documents_of,
)
from vexport.inference.shipped.tool_calls.tools import (
    name_of,
    parameters_of,
    read_tools,
    schema_problem,
    shipped_tools,
)
from vexport.records import Json
from vexport.rules import file as file_rules
from vexport.rules import tools as rules


def tool(name: str = "search", parameters: object = None, **function: object) -> dict[str, object]:
    """Return a tool in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def written(folder: Path, content: object) -> Path:
    file = folder / "tools.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_shipped_tools_are_sound(tmp_path: Path) -> None:
    tools = shipped_tools()
    assert read_tools(written(tmp_path, list(tools))) == tools
    assert len(tools) >= max(TOOL_COUNTS)
    assert len({json.dumps(parameters_of(each)) for each in tools}) > 100


BAD: dict[str, tuple[object, str, str]] = {
    "truncated": ('[{"type": "function", "fun', file_rules.JSON.id, ":1"),
    "empty file": ("", file_rules.JSON.id, ":1"),
    "empty list": ([], rules.FORM.id, ""),
    "an object": ({"tools": []}, rules.FORM.id, ""),
    "not a tool": ([tool(), 7], rules.FORM.id, ": [1]"),
    "no function": ([{"name": "search"}], rules.FORM.id, ": [0]"),
    "other type": ([{**tool(), "type": "web_search"}], rules.FORM.id, ": [0].type"),
    "no name": ([tool("")], rules.FORM.id, ": [0].function.name"),
    "name with spaces": ([tool("find it")], rules.FORM.id, ": [0].function.name"),
    "text of a schema": ([tool(parameters="{}")], rules.FORM.id, ": [0].function.parameters"),
    "wrong description": ([tool(description=[1])], rules.FORM.id, ": [0].function.description"),
    "array": ([tool(parameters={"type": "array"})], rules.FORM.id, ".parameters.type"),
    "wrong type": (
        [tool(), tool("b", {"type": "object", "properties": {"city": {"type": "strin"}}})],
        rules.SCHEMA.id,
        ": [1].function.parameters.properties.city.type",
    ),
    "required is no list": (
        [tool(parameters={"type": "object", "required": "city"})],
        rules.SCHEMA.id,
        ": [0].function.parameters.required",
    ),
    "twice": ([tool(), tool("other"), tool()], rules.TWICE.id, ": [2].function.name"),
    "deep": ("[" * 5000 + "]" * 5000, file_rules.JSON.id, ""),
    "levels": ("[" * 200 + "]" * 200, file_rules.DEPTH.id, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_with_their_place(kind: str, tmp_path: Path) -> None:
    content, rule, place = BAD[kind]
    file = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read_tools(file)
    assert caught.value.rule == rule
    assert caught.value.where.startswith(str(file))
    assert caught.value.where.endswith(place)


def test_schemas_may_state_an_older_version(tmp_path: Path) -> None:
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
    schema = {"type": "object", "properties": {"pair": pair}}
    older = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert read_tools(written(tmp_path, [tool(parameters=older)]))
    with pytest.raises(InputError):
        read_tools(written(tmp_path, [tool(parameters=schema)]))
    with pytest.raises(InputError):
        read_tools(written(tmp_path, [tool(parameters={**schema, "$schema": [7]})]))


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, [tool(""), tool("b", {"type": 3}), {}])
    with pytest.raises(InputErrors) as caught:
        read_tools(file)
    assert len(caught.value.problems) == 3


GOOD: dict[str, JsonObject] = {
    "reference": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "$defs": {
            "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
        },
    },
    "recursive": {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "name": {"type": "string"}},
        "required": ["name"],
    },
    "options": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 500}]}},
        "required": ["a"],
    },
    "bounds": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "maximum": -7},
            "b": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
            "c": {"type": "integer", "multipleOf": 25, "minimum": 30},
            "d": {"type": "string", "minLength": 40, "maxLength": 45},
            "e": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2},
            "f": {"type": ["null", "boolean"]},
            "g": {"const": {"deep": [1]}},
            "h": {"type": "string", "format": "email"},
        },
        "required": [*"abcdefgh"],
        "additionalProperties": False,
    },
    "pattern with examples": {
        "type": "object",
        "properties": {
            "plate": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]$"} | {"examples": ["ABC-1"]}
        },
        "required": ["plate"],
    },
    "all of": {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "older version": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/b"}},
        "required": ["a"],
        "definitions": {"b": {"type": "string", "minLength": 3}},
    },
    "no parameters": {"type": "object", "properties": {}},
    "anchors": {
        "type": "object",
        "properties": {"a": {"$ref": "#node"}, "b": {"$dynamicRef": "#other"}},
        "required": ["a", "b"],
        "$defs": {
            "c": {"$anchor": "node", "type": "integer", "minimum": 500},
            "d": {"$dynamicAnchor": "other", "enum": ["x"]},
        },
    },
    "reference into a list": {
        "allOf": [{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}],
        "properties": {"b": {"$ref": "#/allOf/0"}},
        "required": ["b"],
    },
    "identifiers": {
        "$id": "https://example.com/search.json",
        "type": "object",
        "properties": {
            "a": {"$ref": "item.json"},
            "b": {"$ref": "https://example.com/search.json#/$defs/item"},
        },
        "required": ["a", "b"],
        "$defs": {"item": {"$id": "item.json", "type": "integer", "minimum": 700}},
    },
    "escaped reference": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x~1y%25"}},
        "required": ["a"],
        "$defs": {"x/y%": {"type": "boolean"}, "x": {"y%": {"type": "null"}}},
    },
    "two references": {
        "type": "object",
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}},
        "required": ["a"],
        "$defs": {
            "b": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            "c": {"properties": {"x": {"minimum": 900}, "y": {"const": 1}}, "required": ["y"]},
        },
    },
    "recursive list": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
    },
    "recursive option": {
        "type": "object",
        "properties": {"sum": {"$ref": "#/$defs/term"}},
        "required": ["sum"],
        "$defs": {
            "term": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "left": {"$ref": "#/$defs/term"},
                            "right": {"$ref": "#/$defs/term"},
                        },
                        "required": ["left", "right"],
                        "additionalProperties": False,
                    },
                    {"type": "number"},
                ]
            }
        },
    },
    "large integers": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
            "b": {"type": "integer", "exclusiveMinimum": 2**63 - 1},
            "c": {"type": "integer", "maximum": -(10**17)},
            "d": {"type": "integer", "multipleOf": 10**17 + 1},
            "e": {"type": "integer", "minimum": 10**400},
            "f": {"type": "integer", "minimum": 1.5, "maximum": 2.5},
        },
        "required": [*"abcdef"],
    },
    "forbidden parameter": {
        "type": "object",
        "properties": {"a": False, "b": True},
        "required": ["b"],
    },
    "only null": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}]}},
        "required": ["a"],
    },
}


def test_list_without_items() -> None:
    values: Json = {"type": "array", "maxItems": 0}
    schema: Json = {"type": "object", "properties": {"a": values}, "required": ["a"]}
    function: Json = {"name": "t", "parameters": schema}
    assert arguments_for({"type": "function", "function": function}, Random(0)) == {"a": []}


@pytest.mark.parametrize("kind", GOOD)
def test_arguments_fit_the_schema(kind: str) -> None:
    schema = GOOD[kind]
    called: JsonObject = {"type": "function", "function": {"name": "t", "parameters": dict(schema)}}
    chooser = Random(1)
    for _ in range(20):
        Draft202012Validator(schema).validate(arguments_for(called, chooser))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": "^[A-Z]{3}$"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
        {"$ref": "http://[::1"},
        {"$ref": "#"},
        {"$ref": "#missing"},
        {"$ref": "#/required/a"},
        {"$ref": "#/type/0"},
        {"type": "array", "minItems": 1, "items": {"$ref": "#/properties/a"}},
        {"anyOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}] * 20},
        {"allOf": [{"$ref": "#/properties/a"}]},
        {"type": "integer", "minimum": 9, "maximum": 3},
        {"not": {}},
        {"type": "number", "multipleOf": 100, "minimum": 1, "maximum": 50},
        {"type": "number", "multipleOf": 1e-320},
        {"type": "number", "minimum": -1.7e308, "maximum": 1.7e308},
        {"type": "string", "minLength": 1_000_000_000},
        {"type": "array", "minItems": 1_000_000_000},
    ],
)
def test_impossible_arguments_are_refused(value: Json) -> None:
    schema: Json = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    function: Json = {"name": "t", "parameters": schema}
    with pytest.raises(InputError) as caught:
        arguments_for({"type": "function", "function": function}, Random(0))
    assert caught.value.rule == rules.NO_ARGUMENTS.id


def test_recursive_arguments_are_short() -> None:
    for kind in ("recursive list", "recursive option"):
        called: JsonObject = {
            "type": "function",
            "function": {"name": "t", "parameters": dict(GOOD[kind])},
        }
        sizes = [len(json.dumps(arguments_for(called, Random(seed)))) for seed in range(20)]
        assert max(sizes) < 500


@pytest.mark.parametrize("reference", ["#/required/x", "#/type/0", "#/minProperties/x", "http://["])
def test_arguments_for_a_reference_to_nothing_do_not_fit(reference: str) -> None:
    schema: JsonObject = {
        "type": "object",
        "minProperties": 0,
        "required": ["a"],
        "properties": {"a": {"type": "integer"}, "b": {"$ref": reference}},
    }
    assert not schema_problem({"a": 1}, schema)
    assert schema_problem({"a": 1, "b": 2}, schema)


def test_references_to_addresses_are_not_followed() -> None:
    asked: list[str] = []

    def reply(path: str, _: dict[str, object]) -> Sent:
        asked.append(path)
        return Sent(content={"type": "string"})

    with replying(reply) as url:
        schema: JsonObject = {"properties": {"a": {"$ref": f"{url}/schema.json"}}}
        assert "Unresolvable" in schema_problem({"a": "b"}, schema)
    assert not asked


def test_slow_patterns_are_stopped() -> None:
    schema: JsonObject = {"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    assert "not finished" in schema_problem({"a": "a" * 40 + "b"}, schema)


def names(count: int, part: ShippedPart) -> set[str]:
    return {json.loads(document.details["call"])["name"] for document in documents_of(part, count)}


def test_documents_depend_on_the_seed_alone() -> None:
    def questions(seed: int) -> list[str]:
        part = ShippedPart(task="tool-calls", name="tool-calls-10", seed=seed)
        return [document.question for document in documents_of(part, 10)]

    assert questions(0) == questions(0)
    assert questions(0) != questions(1)
    assert len(set(questions(0))) > 0.9 * DOCUMENTS


@pytest.mark.parametrize("count", TOOL_COUNTS)
def test_expected_calls_fit_one_of_the_tools(count: int) -> None:
    part = ShippedPart(task="tool-calls", name=f"tool-calls-{count}")
    documents = documents_of(part, count)
    assert len(documents) == DOCUMENTS
    for document in documents[::10]:
        (conversation,) = document.conversations
        schemas = {name_of(each): parameters_of(each) for each in conversation.tools}
        assert len(schemas) == count
        call = json.loads(document.details["call"])
        assert not schema_problem(call["arguments"], schemas[call["name"]])


def test_only_the_users_tools_are_called(tmp_path: Path) -> None:
    clash = name_of(shipped_tools()[0])
    own = read_tools(written(tmp_path, [tool("a"), tool(clash), tool("c", description="Do c.")]))
    part = ShippedPart(
        task="tool-calls", name="tool-calls-40", options={"tools": [*map(dict, own)]}
    )
    assert names(40, part) == {"a", clash, "c"}
    document = documents_of(part, 40)[0]
    offered = [name_of(each) for each in document.conversations[0].tools]
    assert len(offered) == len(set(offered)) == 40
    many = [tool(f"t{number}", description=f"Do {number}.") for number in range(130)]
    part = ShippedPart(task="tool-calls", name="tool-calls-120", options={"tools": many})  # type: ignore[dict-item]
    assert len(documents_of(part, 120)[0].conversations[0].tools) == 120


@pytest.mark.parametrize("describe", [lambda number: None, lambda number: "Do the same."])
def test_tools_without_clear_descriptions_are_named(
    describe: Callable[[int], str | None],
) -> None:
    own = [tool(f"t{number}", description=describe(number)) for number in range(12)]
    part = ShippedPart(task="tool-calls", name="tool-calls-10", options={"tools": own})  # type: ignore[dict-item]
    for document in documents_of(part, 10):
        assert json.loads(document.details["call"])["name"] in document.question
