"""The shipped task `tool-calls`: does the model call the right tool, with the right arguments?

A conversation offers 1, 10, 40 or 120 tools, and its question asks for one call. The question
describes the tool in the words of its definition, and states all arguments, so that nothing has to
be known or guessed. A part of the task has the conversations with the same number of tools, because
calls often break only above a number of tools.

A response is correct if it is exactly one call, and all three are true:

- `well_formed`: the arguments are a JSON object that fits the schema of the called tool.
- `right_tool`: the call names the right tool.
- `equal_arguments`: the arguments equal the expected arguments as JSON.

A response without a call has none of the three. `complete` is 0 if the finish reason is `length`. A
call that was cut is lost, as are other cut responses (`vexport/judge/lost.py`).

`tools.py` reads the tools, `values.py` makes arguments, and `questions.py` makes documents.
`parser.py` finds the calls in a text of an engine, with vLLM's parsers.
"""

import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from vexport.inference.shipped.base import (
    CORRECT,
    Document,
    PartOutcome,
    ShippedPart,
    ShippedTask,
)
from vexport.inference.shipped.tool_calls.questions import TOOL_COUNTS, documents_of, text_bytes
from vexport.inference.shipped.tool_calls.scoring import score_calls
from vexport.inference.shipped.tool_calls.tools import read_tools
from vexport.inference.stored_responses import FinishedText
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import TOOL_CALLS

_FAULTS = {
    "well_formed": "malformed",
    "right_tool": "of another tool",
    "equal_arguments": "with other arguments",
}
_SEVERAL = "not alone"
# Tokens of a tool's definition are at most a third of its bytes in common tokenizers. Templates
# may write the definitions as JSON with indentation or twice.
_BYTES_PER_TOKEN = 2


class ToolCalls(ShippedTask):
    """Calls of tools, by the number of tools."""

    name = TOOL_CALLS
    metrics = (CORRECT, *_FAULTS, "complete")
    max_gen_toks = 512
    takes_tools = True

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{count}" for count in TOOL_COUNTS)

    def options(self, settings: Evaluate) -> Mapping[str, JsonValue]:
        """Return the user's tools, or nothing for the tools that vexport ships."""
        return {} if settings.tools is None else {"tools": [*map(dict, read_tools(settings.tools))]}

    def documents(self, part: ShippedPart) -> Sequence[Document]:
        """Return questions with the part's number of tools."""
        return documents_of(part, _count(part.name))

    def score(
        self, part: ShippedPart, document: Document, responses: Sequence[FinishedText]
    ) -> Mapping[str, float]:
        """Compare the response's call with the expected call."""
        (response,) = responses
        (conversation,) = document.conversations
        return score_calls(conversation.tools, json.loads(document.details["call"]), response)

    def longest_sequence(self, part: ShippedPart) -> int:
        """Return a number of tokens that is enough for the part's tools in usual templates."""
        return text_bytes(part, _count(part.name)) // _BYTES_PER_TOKEN + 2 * self.max_gen_toks

    def fault(self, scores: Mapping[str, float]) -> str:
        """Return the first of the three conditions that a call does not meet."""
        return next((_FAULTS[name] for name in _FAULTS if not scores.get(name)), _SEVERAL)

    def explain_loss(self, parts: Sequence[PartOutcome]) -> str:
        """Return `from 40 tools on, 12 of 100 calls are malformed that were right before`."""
        failed = [part for part in parts if part.outcome == "FAIL"]
        if not failed:
            return ""
        least = min(_count(part.name) for part in failed)
        above = [part for part in parts if _count(part.name) >= least]
        tools = f"{least} {'tool' if least == 1 else 'tools'}"
        place = f"from {tools} on" if len(failed) == len(above) > 1 else f"with {tools}"
        shown = failed if len(failed) == len(above) else [min(failed, key=_size)]
        calls = sum(part.documents for part in shown)
        faults: dict[str, int] = {}
        for part in shown:
            for fault, number in part.faults.items():
                faults[fault] = faults.get(fault, 0) + number
        order = (*_FAULTS.values(), _SEVERAL)
        counted = [(faults[fault], fault) for fault in order if faults.get(fault)]
        if not counted:
            return ""
        (first, fault), *others = counted
        verb = "is" if first == 1 else "are"
        were = "was" if first == 1 else "were"
        rest = "".join(f", and {number} {other}" for number, other in others)
        return f"{place}, {first} of {calls:,} calls {verb} {fault} that {were} right before{rest}"


def _count(name: str) -> int:
    return int(name.rpartition("-")[2])


def _size(part: PartOutcome) -> int:
    return _count(part.name)
