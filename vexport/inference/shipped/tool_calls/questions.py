"""Make the documents of the task `tool-calls`: sets of tools, and questions that ask for a call."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from time import monotonic

from vexport.errors import InputError
from vexport.inference.shipped.base import Conversation, Document, JsonObject, ShippedPart
from vexport.inference.shipped.tool_calls.tools import (
    description_of,
    name_of,
    parameters_of,
    schema_problem,
    shipped_tools,
)
from vexport.inference.shipped.tool_calls.values import CannotMake, ValueMaker
from vexport.inference.stored_responses import Call
from vexport.records import Json
from vexport.rules import tools as rules

TOOL_COUNTS = (1, 10, 40, 120)
"""Numbers of tools in a conversation."""
DOCUMENTS = 500
"""Number of documents of each part. Without a loss, 140 documents pass a margin of 2 points."""
# Questions share sets of tools, so that an engine with a prefix cache reads a set only once.
_LEAST_SETS = 8
# Number of attempts to make arguments that fit a schema.
_ATTEMPTS = 30
# No further attempt begins after this time. A schema may have slow regular expressions.
_SECONDS = 4.0
_DIGITS = 16


def documents_of(part: ShippedPart, count: int) -> list[Document]:
    """Return the documents of a part with `count` tools.

    The called tool is one of the user's tools, if there are any. If the user has fewer tools than
    `count`, shipped tools are added. Raises InputError if no arguments fit a tool's schema.
    """
    chooser = Random(f"{part.seed} {count}")
    own = _own_tools(part)
    sets = [_tool_set(own, count, chooser) for _ in range(max(_LEAST_SETS, DOCUMENTS // count))]
    names = {name_of(tool) for tool in own}
    made = []
    for number in range(DOCUMENTS):
        tools = sets[number % len(sets)]
        called = chooser.choice([tool for tool in tools if name_of(tool) in names])
        arguments = arguments_for(called, chooser)
        made.append(_document(tools, called, arguments))
    return made


def text_bytes(part: ShippedPart, count: int) -> int:
    """Return the number of bytes of the largest set of tools, as JSON."""
    sizes = sorted((len(json.dumps(tool)) for tool in _known(_own_tools(part))), reverse=True)
    return sum(sizes[:count])


def _own_tools(part: ShippedPart) -> Sequence[JsonObject]:
    given = part.options.get("tools")
    listed = given if isinstance(given, list) else []
    own = tuple(tool for tool in listed if isinstance(tool, dict))
    return own or shipped_tools()


def _known(own: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the user's tools, and the shipped tools with other names."""
    names = {name_of(tool) for tool in own}
    return [*own, *(tool for tool in shipped_tools() if name_of(tool) not in names)]


def _tool_set(own: Sequence[JsonObject], count: int, chooser: Random) -> tuple[JsonObject, ...]:
    chosen = chooser.sample(list(own), min(count, len(own)))
    others = _known(own)[len(own) :]
    chosen += chooser.sample(others, count - len(chosen))
    chooser.shuffle(chosen)
    return tuple(chosen)


def arguments_for(tool: JsonObject, chooser: Random) -> dict[str, Json]:
    """Return arguments that fit the schema of a tool.

    Raises InputError if no such arguments are found. A text with a `pattern` needs `examples`.
    """
    schema = parameters_of(tool)
    reason = ""
    end = monotonic() + _SECONDS
    for _ in range(_ATTEMPTS):
        try:
            made = ValueMaker(schema, chooser).arguments()
        except CannotMake as error:
            reason = str(error)
            break
        reason = schema_problem(made, schema)
        if not reason:
            return made
        if monotonic() > end:
            break
    raise InputError.of(rules.NO_ARGUMENTS, f"tool {name_of(tool)}", reason=reason)


def _document(
    tools: Sequence[JsonObject], called: JsonObject, arguments: dict[str, Json]
) -> Document:
    question = _question(tools, called, arguments)
    text = json.dumps(arguments, ensure_ascii=False)
    call = {"name": name_of(called), "arguments": arguments}
    return Document(
        question=question,
        target=str(Call(name_of(called), text)),
        conversations=(
            Conversation(messages=({"role": "user", "content": question},), tools=tuple(tools)),
        ),
        details={"call": json.dumps(call, ensure_ascii=False), "tools": _digest(tuple(tools))},
    )


def _question(tools: Sequence[JsonObject], called: JsonObject, arguments: dict[str, Json]) -> str:
    """Ask for a call. The tool is named if its description is missing or not unique."""
    description = description_of(called)
    counts = Counter(map(description_of, tools))
    is_clear = bool(description) and counts[description] == 1
    task = description if is_clear else f"Call the tool {name_of(called)}"
    values = "; ".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
    )
    given = f" Use these values: {values}." if values else " It needs no values."
    return f"Do this with one tool call: {task.rstrip('.')}.{given} Leave out all other values."


def _digest(tools: tuple[JsonObject, ...]) -> str:
    return _digest_of_text(json.dumps(tools, sort_keys=True))


@cache
def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
