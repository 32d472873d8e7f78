"""Prepare conversations for a chat template as vLLM's chat endpoint does, and render them.

The rules follow vLLM 0.32:

- reasoning_content and tools: `ChatCompletionRequest` in
  vllm/entrypoints/openai/chat_completion/protocol.py
- contents and tool calls: `parse_chat_messages` and `_postprocess_messages` in
  vllm/renderers/chat_utils.py
- what a template expects: `_detect_content_format` and `_convert_developer_to_system` in
  vllm/renderers/hf.py

A test compares `served_messages` with vLLM.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vexport.errors import first_line
from vexport.records.patterns import TEMPLATE_BYTES, TEMPLATE_SECONDS, memory_limit, time_limit

Message = Mapping[str, object]
ContentFormat = Literal["string", "openai"]
# Types of content parts with text, and the key that holds the text.
_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Keys of content parts that vLLM processes itself. It passes other keys to the template.
_KEYS_OF_PARTS = frozenset(
    (
        "type",
        "text",
        "refusal",
        "thinking",
        "closed",
        "name",
        "data",
        "uuid",
        "file",
        "tool_reference",
    )
)
_MEDIA_PART = re.compile(
    r"(input_|output_)?(image|img|picture|photo|video|audio|sound|speech|voice|file|document|media)s?"
    r"([_-]?(url|urls|pil|embeds|path|paths|data|file|id|bytes|base64|tensor|blob))?|inline_?data|file_?data",
    re.IGNORECASE,
)
# Clients put this line into system prompts. vLLM removes it, because it differs in every request.
_BILLING_HEADER = "x-anthropic-billing-header"
# Replaces tool calls and their results in a second rendering. If the text stays the same, the
# template does not show them.
_PROBE = "vexport_probe"
TOOLS, CALLS, RESULTS = "tools", "tool_calls", "results of tools"


class MultimodalRowError(ValueError):
    """A row with an image, a video or sound, which calibration of the language model cannot use."""


class RefusedTurnsError(ValueError):
    """Turns that the chat template rejects. A server would reject these turns, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of a conversation as messages of OpenAI's chat API, and the tools of the model."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


class ChatTokenizer(Protocol):
    """Method of a transformers tokenizer that renders a chat template."""

    def apply_chat_template(
        self, conversation: object, *, tools: object, chat_template: str, tokenize: bool
    ) -> str: ...


def served_messages(messages: Sequence[Message], template: str) -> list[Message]:
    """Return the messages that vLLM passes to this chat template for the messages of a request.

    Raises ValueError if vLLM would refuse the request, and MultimodalRowError for content that is
    not text.
    """
    is_openai = content_format(template) == "openai"
    served = [_served_message(message, is_openai=is_openai) for message in messages]
    roles = {message["role"] for message in served}
    if "developer" in roles and not re.search("\"developer\"|'developer'", template):
        return _with_single_system_message([_as_system(message) for message in served])
    return served


def render_conversation(tokenizer: ChatTokenizer, template: str, conversation: Conversation) -> str:
    """Return the text of a conversation.

    Raises RefusedTurnsError with the reason if the template refuses the conversation. A chat
    template is a program from the checkpoint, so its time and memory are limited.
    """
    messages = served_messages(conversation.messages, template)
    try:
        with time_limit(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES):
            return tokenizer.apply_chat_template(
                messages,
                tools=list(conversation.tools) or None,
                chat_template=template,
                tokenize=False,
            )
    except MemoryError:
        reason = f"it needs more than {TEMPLATE_BYTES >> 30} GB of memory"
    except Exception as error:
        reason = first_line(error)
    raise RefusedTurnsError(f"turns that the chat template refuses ({reason})")


def unrendered_parts(
    conversation: Conversation, text: str, render: Callable[[Conversation], str]
) -> Iterator[str]:
    """Yield TOOLS, CALLS or RESULTS for each part of a conversation that `text` does not show.

    `text` is the rendered conversation. To test a part, the part is changed and the conversation is
    rendered again. The template shows the part if the text changes or if the rendering fails.
    """
    for part, changed in (
        (TOOLS, replace(conversation, tools=())),
        (
            CALLS,
            replace(conversation, messages=tuple(map(_with_probe_calls, conversation.messages))),
        ),
        (
            RESULTS,
            replace(conversation, messages=tuple(map(_with_probe_result, conversation.messages))),
        ),
    ):
        if changed == conversation:
            continue
        try:
            is_same = render(changed) == text
        except RefusedTurnsError:
            is_same = False
        if is_same:
            yield part


def media_of_part(part: Mapping[str, object]) -> str | None:
    """Return the type or key that marks a content part as an image, a video, sound or a file.

    Returns None for text.
    """
    kind = part.get("type")
    if isinstance(kind, str) and _MEDIA_PART.fullmatch(kind):
        return kind
    return next(
        (
            key
            for key, value in part.items()
            if value not in (None, "", [], {}) and _MEDIA_PART.fullmatch(key)
        ),
        None,
    )


def _served_message(message: Message, *, is_openai: bool) -> Message:
    """Return a message with the changes that vLLM makes before rendering.

    vLLM makes them in `_parse_chat_message_content` and `_postprocess_messages`.
    """
    role = message["role"]
    parts = list(_text_parts(message, is_openai=is_openai))
    if role == "system":
        parts = list(_without_billing_header(parts))
    served: dict[str, object] = {
        "role": role,
        "content": parts if is_openai else _join_parts(parts),
    }
    if role == "assistant":
        served |= _calls_and_reasoning(message)
    elif role == "tool":
        if "tool_call_id" in message:
            served["tool_call_id"] = message["tool_call_id"]
        if all(part["type"] == "text" for part in parts):
            served["content"] = _join_parts(parts)
    served |= {key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)}
    if role == "developer":
        served["tools"] = message.get("tools")
    return served


def _calls_and_reasoning(message: Message) -> Message:
    """Return the tool calls and the reasoning of an assistant's message."""
    served: dict[str, object] = {}
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        served["tool_calls"] = [_served_call(call) for call in calls]
    reasoning = message.get("reasoning")
    reasoning = message.get("reasoning_content") if reasoning is None else reasoning
    if reasoning is not None:
        served["reasoning"] = served["reasoning_content"] = reasoning
    # vLLM renders gpt-oss with Harmony, not with the chat template. Calibration uses the template,
    # which reads this key.
    if isinstance(message.get("thinking"), str):
        served["thinking"] = message["thinking"]
    return served


def _text_parts(message: Message, *, is_openai: bool) -> Iterator[Message]:
    """Yield the parts of a message's content: texts, and references to tools by name."""
    content = message.get("content")
    if content is None:
        return
    if not isinstance(content, Sequence):
        raise ValueError(
            f"a content of type {type(content).__name__} instead of text or a list of parts"
        )
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, str):
            yield {"type": "text", "text": part}
        elif not isinstance(part, Mapping):
            raise ValueError(
                f"a content part of type {type(part).__name__} instead of text or an object"
            )
        elif media := media_of_part(part):
            raise MultimodalRowError(media)
        elif part.get("type") == "tool_reference":
            yield {"type": "tool_reference", "name": part.get("name")}
        elif (text := _text_of_part(part)) is not None:
            others = {
                key: part[key]
                for key in part
                if key not in _KEYS_OF_PARTS and part[key] is not None
            }
            yield {"type": "text", "text": text, **(others if is_openai else {})}


def _text_of_part(part: Message) -> str | None:
    """Return the text of a content part. Returns None for a part without text, which vLLM skips."""
    kind = part.get("type")
    if kind is None and "text" in part:
        kind = "text"
    if not isinstance(kind, str) or kind not in _TEXT_OF_PART:
        raise ValueError(f"a content part of type {kind!r} instead of {', '.join(_TEXT_OF_PART)}")
    text = part.get(_TEXT_OF_PART[kind])
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"a content part with {_TEXT_OF_PART[kind]} of type {type(text).__name__}, not text"
        )
    return text


def _join_parts(parts: Sequence[Message]) -> str:
    return "\n".join(
        str(part["text"] if part["type"] == "text" else part["name"]) for part in parts
    )


def _without_billing_header(parts: Sequence[Message]) -> Iterator[Message]:
    for part in parts:
        text = part.get("text")
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest}


def _served_call(call: object) -> Message:
    """Return a tool call with its arguments as an object, as templates expect.

    Arguments that are not a JSON object become an empty object, as in vLLM.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ValueError("a tool call that is not an object with a function")
    if call.get("type", "function") != "function":
        raise ValueError(f"a tool call of type {call.get('type')!r} instead of function")
    return {**call, "function": {**function, "arguments": arguments_of(function) or {}}}


def arguments_of(function: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the arguments of a call as an object.

    Returns None if the arguments are neither an object nor the JSON text of an object.
    """
    arguments = function.get("arguments")
    if not arguments:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, Mapping) else None


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _with_single_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join all system messages into a single message in front.

    Messages with a single system message in front stay as they are.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return list(messages)
    texts = []
    for place in places:
        content = messages[place]["content"]
        text = content if isinstance(content, str) else _join_parts(content)  # type: ignore[arg-type]
        if text:
            texts.append(text)
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _with_probe_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not isinstance(calls, Sequence) or not calls:
        return message
    other = {"name": _PROBE, "arguments": {_PROBE: _PROBE}}
    return {**message, "tool_calls": [{**call, "function": other} for call in calls]}


def _with_probe_result(message: Message) -> Message:
    return {**message, "content": _PROBE} if message["role"] == "tool" else message


class _Generation(Extension):
    """Block `generation` in templates for training. transformers supports it."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements inside the block, so that the block itself has no effect."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _UnsupportedAssignmentError(ValueError):
    """A template that assigns to something other than a name. vLLM cannot analyze it, either."""


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
    """Return `openai` if a template loops over the parts of a message's content, otherwise
    `string`.

    vLLM decides this by the template's syntax tree. The result is also `string` if vLLM cannot
    parse or analyze the template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    try:
        root = environment.parse(template)
        return "openai" if _loops_over_content(root) else "string"
    except Exception:  # rendering reports errors in the template
        return "string"


def _loops_over_content(root: nodes.Template) -> bool:
    """Return True if a loop iterates over `message.content`, or over a macro's parameter
    that receives it.
    """
    loops = list(root.find_all(nodes.For))
    lists_of_messages = _names_of(root, "messages")
    items = [
        _name(loop.target)
        for loop in loops
        if any(_is_reference(loop.iter, variable) for variable in lists_of_messages)
    ]
    in_macros = _loops_in_macros(root, items)
    for loop in loops:
        if any(_is_reference(loop.iter, item, "content") for item in items):
            return _name(loop.target) != ""
        parameters = in_macros.get(id(loop))
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in (
            ("content",) if parameters is None else parameters
        ):
            return _name(loop.target) != ""
    return False


def _loops_in_macros(root: nodes.Template, items: Sequence[str]) -> Mapping[int, set[str]]:
    """Return, for each loop inside a macro, the macro's parameters that receive
    a message's content.
    """
    found: dict[int, set[str]] = {}
    calls = [call for call in root.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in root.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            values = [
                *zip(names, call.args, strict=False),
                *((pair.key, pair.value) for pair in call.kwargs),
            ]
            given |= {
                name
                for name, value in values
                if name in names and any(_is_reference(value, item, "content") for item in items)
            }
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = given or found.get(id(loop), set())
    return found


def _names_of(root: nodes.Template, variable: str) -> list[str]:
    """Return a variable, and the names to which it is assigned, also sliced or filtered."""
    names = [variable]
    for name in names:  # the list grows during the loop
        for assignment in root.find_all(nodes.Assign):
            if (
                _is_reference(assignment.node, name)
                and (target := _name(assignment.target)) not in names
            ):
                names.append(target)
    return names


def _name(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnsupportedAssignmentError(type(node).__name__)
    return node.name


def _is_reference(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Return True if an expression is a variable, or its `key`.

    Filters, tests and slices around the variable are ignored.
    """
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        elif isinstance(node, nodes.Getattr):
            is_key = node.attr == key
        else:
            return False
        if not is_key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
