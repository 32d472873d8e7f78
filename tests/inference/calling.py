"""A server that calls tools: it answers the questions of the task `tool-calls`, with faults."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.inference.replying import CARD, Reply, Sent

Tool = Mapping[str, Any]
Fault = Callable[[int, int, str, str], dict[str, Any]]
"""A function from the numbers of tools and of the question, the right name and arguments, to a
choice."""


def call(name: str, arguments: str, reason: str = "tool_calls") -> dict[str, Any]:
    """Return a choice with one call."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"index": 0, "message": message, "finish_reason": reason}


def right(tools: int, number: int, name: str, arguments: str) -> dict[str, Any]:
    return call(name, arguments)


def broken_from(least: int, share: int = 4) -> Fault:
    """Return a fault: from `least` tools on, every call with a number divisible by `share`."""

    def fault(tools: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        is_broken = tools >= least and number % share == 0
        return call(name, f"{arguments[:-1]}, " if is_broken else arguments)

    return fault


def solved(question: str, tools: list[Tool]) -> tuple[str, str]:
    """Return the name and the arguments of the call that the question asks for."""
    task = question.split(": ", 1)[1].split(" Use these values: ")[0].split(" It needs ")[0]
    functions = [tool["function"] for tool in tools]
    by_description = {each.get("description", "").rstrip("."): each["name"] for each in functions}
    name = by_description.get(task.rstrip(".")) or task.rstrip(".").rpartition(" ")[2]
    values: dict[str, Any] = {}
    rest = question.partition(" Use these values: ")[2]
    while " = " in rest:
        key, _, rest = rest.partition(" = ")
        value, end = json.JSONDecoder().raw_decode(rest)
        values[key], rest = value, rest[end:].removeprefix("; ")
    return name, json.dumps(values)


class CallingServer:
    """Replies as vLLM does to conversations with tools. `asked` has all requests."""

    def __init__(self, fault: Fault = right, *, max_model_len: int = 65536) -> None:
        self.fault = fault
        self.asked: list[dict[str, Any]] = []
        self._card = {**CARD, "max_model_len": max_model_len}
        self._numbers: dict[str, int] = {}

    @property
    def reply(self) -> Reply:
        return self._reply

    def _reply(self, path: str, body: dict[str, Any]) -> Sent:
        if path == "/v1/models":
            return Sent(content={"data": [self._card]})
        if path == "/version":
            return Sent(content={"version": "0.32.0"})
        if path != "/v1/chat/completions":
            return Sent(content={"detail": "Not Found"}, status=404)
        self.asked.append(body)
        question = body["messages"][-1]["content"]
        number = sum(map(ord, question))
        choice = self.fault(len(body["tools"]), number, *solved(question, body["tools"]))
        return Sent(content={"choices": [choice], "usage": {"completion_tokens": 20}})
