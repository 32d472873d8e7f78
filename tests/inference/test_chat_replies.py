"""Replies of servers to conversations."""

import pytest

from vexport.inference.endpoint.replies import TemporaryError, chat_answer_of
from vexport.inference.stored_responses import Call
from vexport.records import Json


def reply(message: Json, reason: Json = "tool_calls", tokens: int = 5) -> dict[str, Json]:
    choice: Json = {"index": 0, "message": message, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def called(function: Json) -> Json:
    return {"content": None, "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ({"name": "a", "arguments": '{"b": 1}'}, Call("a", '{"b": 1}')),
        ({"name": "a", "arguments": '{"b": '}, Call("a", '{"b": ')),
        ({"name": "a", "arguments": {"b": 1}}, Call("a", '{"b": 1}')),
        ({"name": "a", "arguments": None}, Call("a", "{}")),
        ({"name": "a"}, Call("a", "")),
        ({"name": "\ud800"}, Call("\ufffd", "")),
    ],
)
def test_calls_of_a_message(function: Json, call: Call) -> None:
    answer = chat_answer_of(reply(called(function)), {"max_tokens": 16})
    assert answer.calls == (call,)
    assert (answer.text, answer.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("reason", "tokens", "expected"),
    [
        ("tool_calls", 5, "stop"),
        ("function_call", 5, "stop"),
        ("tool_calls", 16, "length"),
        ("stop", 16, "stop"),
        ("length", 16, "length"),
        ("max_tokens", 5, "length"),
        (None, 5, ""),
    ],
)
def test_finish_reason_of_a_message(reason: Json, tokens: int, expected: str) -> None:
    content = reply({"content": "Hello", "tool_calls": []}, reason, tokens)
    answer = chat_answer_of(content, {"max_tokens": 16})
    assert (answer.text, answer.finish_reason, answer.calls) == ("Hello", expected, ())


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"choices": []},
        {"choices": [{"text": "no message"}]},
        reply({"content": 7}),
        reply(called({})),
        reply(called({"name": 7})),
        reply({"tool_calls": ["a"]}),
        reply({"content": "cut"}, "abort"),
    ],
)
def test_unusable_messages_are_asked_again(content: Json) -> None:
    with pytest.raises(TemporaryError):
        chat_answer_of(content, {"max_tokens": 16})
