"""Find the calls in a model's text with vLLM's parsers. Only worker processes use this module.

A parser knows the format in which a family of models writes calls. `vllm serve` takes its name in
`--tool-call-parser`. vLLM's registry has the names.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING

from vexport.errors import InputError, first_line, nearest_hint
from vexport.inference.stored_responses import Call, FinishedText, text_with_calls
from vexport.records import Json
from vexport.rules import tools as rules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTION = "--tool-call-parser"


def require_parser(name: str) -> None:
    """Raise InputError if vLLM has no parser with this name. The error names the nearest parser."""
    import vllm
    from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

    known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
    if name not in known:
        raise InputError.of(
            rules.UNKNOWN_PARSER,
            OPTION,
            name=name,
            hint=nearest_hint(name, known),
            vllm=vllm.__version__,
            known=", ".join(known),
        )


def with_parsed_calls(
    text: FinishedText,
    parser: str,
    tokenizer: "PreTrainedTokenizerBase",
    tools: Sequence[Mapping[str, Json]],
) -> FinishedText:
    """Return a response with the calls that the parser finds in its text.

    If the parser fails or finds no call, the text is returned as it is. Raises InputError if the
    parser needs tokens that the tokenizer does not have.
    """
    from vllm.tool_parsers import abstract_tool_parser as vllm_parsers

    request = vllm_parsers.ChatCompletionRequest(
        model="", messages=[{"role": "user", "content": ""}], tools=[*map(dict, tools)]
    )
    try:
        kind = vllm_parsers.ToolParserManager.get_tool_parser(parser)
        # Older versions of vLLM do not pass the tools to the parser.
        takes_tools = len(signature(kind).parameters) > 1
        instance = kind(tokenizer, request.tools) if takes_tools else kind(tokenizer)
    except Exception as error:  # a parser may raise anything, or lack a package
        reason = first_line(error)
        raise InputError.of(rules.UNFIT_PARSER, OPTION, name=parser, reason=reason) from error
    try:
        found = instance.extract_tool_calls(str(text), request)
    except Exception as error:  # a parser may raise anything on malformed text
        print(f"the parser {parser} failed: {error!r}", flush=True)  # for the worker's log
        return text
    calls = [Call(each.function.name, each.function.arguments) for each in found.tool_calls]
    if not calls:
        return text
    return text_with_calls(found.content or "", text.finish_reason, calls)
