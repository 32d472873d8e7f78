"""Scores of calls."""

import json
from collections.abc import Sequence

import pytest

from vexport.inference.shipped import SHIPPED
from vexport.inference.shipped.base import JsonObject, PartOutcome
from vexport.inference.shipped.tool_calls.scoring import same_json, score_calls
from vexport.inference.stored_responses import Call, text_with_calls
from vexport.records import Json, Outcome

TOOLS: Sequence[JsonObject] = (
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {"seats": {"type": "integer"}, "city": {"type": "string"}},
                "required": ["seats"],
            },
        },
    },
    {"type": "function", "function": {"name": "cancel"}},
)
EXPECTED: JsonObject = {"name": "book", "arguments": {"seats": 2, "city": "Oslo"}}
RIGHT = '{"city": "Oslo", "seats": 2}'


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        ([Call("book", RIGHT)], (1, 1, 1, 1)),
        ([Call("book", '{"seats": 2.0, "city": "Oslo"}')], (1, 1, 1, 1)),
        ([], (0, 0, 0, 0)),
        ([Call("book", RIGHT[:-1])], (0, 0, 1, 0)),
        ([Call("book", '{"seats": "2", "city": "Oslo"}')], (0, 0, 1, 0)),
        ([Call("book", '{"city": "Oslo"}')], (0, 0, 1, 0)),
        ([Call("book", '{"seats": 3, "city": "Oslo"}')], (0, 1, 1, 0)),
        ([Call("book", '{"seats": true, "city": "Oslo"}')], (0, 0, 1, 0)),
        ([Call("book", '{"seats": NaN}')], (0, 0, 1, 0)),
        ([Call("book", "[2]")], (0, 0, 1, 0)),
        ([Call("cancel", "")], (0, 1, 0, 0)),
        ([Call("cancel", RIGHT)], (0, 1, 0, 1)),
        ([Call("unknown", RIGHT)], (0, 1, 0, 1)),
        ([Call("book", RIGHT), Call("book", RIGHT)], (0, 1, 1, 1)),
        ([Call("book", "[" * 100_000)], (0, 0, 1, 0)),
    ],
)
def test_parts_of_a_call(calls: list[Call], parts: tuple[int, ...]) -> None:
    scores = score_calls(TOOLS, EXPECTED, text_with_calls("", "stop", calls))
    assert tuple(scores.values()) == (*parts, 1)


def test_cut_calls_are_not_complete() -> None:
    response = text_with_calls("", "length", [Call("book", RIGHT[:-1])])
    assert score_calls(TOOLS, EXPECTED, response)["complete"] == 0


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (False, 0, False),
        (None, False, False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": [None]}, {"b": [None], "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
    ],
)
def test_equal_json(value: Json, other: Json, same: bool) -> None:
    assert same_json(value, other) is same


def part(count: int, outcome: Outcome, **faults: int) -> PartOutcome:
    named = {name.replace("_", " "): number for name, number in faults.items()}
    return PartOutcome(name=f"tool-calls-{count}", outcome=outcome, documents=50, faults=named)


@pytest.mark.parametrize(
    ("parts", "clause"),
    [
        ([part(1, "PASS"), part(40, "INCONCLUSIVE", malformed=3)], ""),
        (
            [part(1, "PASS"), part(40, "FAIL", malformed=5), part(120, "FAIL", malformed=7)],
            "from 40 tools on, 12 of 100 calls are malformed that were right before",
        ),
        (
            [part(1, "PASS"), part(40, "FAIL", malformed=1, of_another_tool=9)],
            "with 40 tools, 1 of 50 calls is malformed that was right before, and 9 of another "
            "tool",
        ),
        (
            [part(40, "FAIL", with_other_arguments=5), part(120, "PASS")],
            "with 40 tools, 5 of 50 calls are with other arguments that were right before",
        ),
        (
            [part(1, "FAIL", malformed=5)],
            "with 1 tool, 5 of 50 calls are malformed that were right before",
        ),
    ],
)
def test_clause_of_a_loss(parts: list[PartOutcome], clause: str) -> None:
    assert SHIPPED["tool-calls"].explain_loss(parts) == clause


def test_faults_are_named_by_the_first_wrong_part() -> None:
    task = SHIPPED["tool-calls"]
    scores = {"well_formed": 1.0, "right_tool": 1.0, "equal_arguments": 1.0}
    assert task.fault({**scores, "well_formed": 0.0, "right_tool": 0.0}) == "malformed"
    assert task.fault({**scores, "right_tool": 0.0}) == "of another tool"
    assert task.fault({**scores, "equal_arguments": 0.0}) == "with other arguments"
    assert task.fault(scores) == "not alone"


def test_calls_survive_copies_and_files() -> None:
    from copy import deepcopy

    from vexport.inference.stored_responses import answer_from_json, answer_to_json

    response = text_with_calls("I book.", "stop", [Call("book", RIGHT)])
    assert deepcopy(response).calls == response.calls
    stored = json.loads(json.dumps(answer_to_json(response, "stop", response.calls)))
    assert answer_from_json(stored).calls == response.calls
    assert str(response) == f"I book.\nbook({RIGHT})"
