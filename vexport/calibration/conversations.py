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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar

from jinja2 import nodes

from vexport.errors import first_line
from vexport.records.patterns import TEMPLATE_BYTES, TEMPLATE_SECONDS, memory_limit, time_limit
from vexport.rules import calibration as rules
from vexport.rules.book import Rule

# A message as rows.py makes it: a role, and content that is text, a list of parts or None.
Message = Mapping[str, Any]
ContentFormat = Literal["string", "openai"]
# First character of a part of a text, and the first character after it.
Span = tuple[int, int]
T = TypeVar("T")
# A tag of transformers' templates: text up to `endgeneration` is the assistant's.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
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
# The content part of a picture, as vLLM passes it to templates that read parts, and the character
# that stands for it in text: U+FFFC, the object replacement character.
PICTURE: Mapping[str, str] = {"type": "image"}
PICTURE_MARK = "\ufffc"
# Clients put this line into system prompts. vLLM removes it, because it differs in every request.
_BILLING_HEADER = "x-anthropic-billing-header"
# Parts of a conversation that may be missing in its text.
TOOLS, CALLS, RESULTS, ARGUMENTS = "tools", "tool_calls", "results of tools", "arguments"


class RowError(ValueError):
    """A row that calibration cannot use, and the rule that it breaks.

    Rows with an image, a video or sound break NO_TEXT. They are skipped.
    """

    def __init__(self, reason: str, rule: Rule = rules.ROW) -> None:
        self.reason = reason
        self.rule = rule
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of a conversation as messages of OpenAI's chat API, and the tools of the model.

    `loss_mask` is the unchecked column of the row with this name.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    loss_mask: object = None


class ChatTokenizer(Protocol):
    """Method of a transformers tokenizer that renders a chat template, and its special tokens."""

    special_tokens_map: Mapping[str, Any]

    def apply_chat_template(
        self, conversation: object, *, tools: object, chat_template: str, tokenize: bool
    ) -> str: ...


def served_messages(messages: Sequence[Message], template: str) -> list[Message]:
    """Return the messages that vLLM passes to this chat template for the messages of a request.

    Raises RowError if vLLM would refuse the request.
    """
    is_openai = content_format(template) == "openai"
    served = [_served_message(message, is_openai=is_openai) for message in messages]
    roles = {message["role"] for message in served}
    if "developer" in roles and not re.search("\"developer\"|'developer'", template):
        return _with_single_system_message(served)
    return served


def render_conversation(tokenizer: ChatTokenizer, template: str, conversation: Conversation) -> str:
    """Return the text of a conversation.

    Raises RowError with the reason if the template refuses the conversation, as a server would. A
    chat template is a program from the checkpoint, so its time and memory are limited.
    """

    def render(messages: Sequence[Message]) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tools=list(conversation.tools) or None,
            chat_template=template,
            tokenize=False,
        )

    return _limited(render, template, conversation)


def marks_answers(template: str) -> bool:
    """Return True if a chat template marks the assistant's turns with `{% generation %}`."""
    return _GENERATION.search(template) is not None


def marked_spans(
    tokenizer: ChatTokenizer, template: str, conversation: Conversation
) -> Sequence[Span]:
    """Return the parts of a conversation's text that the template marks as the assistant's.

    Raises RowError like `render_conversation`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Sequence[Message]) -> Sequence[Span]:
        spans: Sequence[Span]
        _, (spans,) = render_jinja_template(
            [messages],
            tools=list(conversation.tools) or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return spans

    return _limited(render, template, conversation)


def _limited(
    render: Callable[[Sequence[Message]], T], template: str, conversation: Conversation
) -> T:
    """Call `render` with the messages that vLLM passes to the template, within limits."""
    messages = served_messages(conversation.messages, template)
    try:
        with time_limit(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES):
            return render(messages)
    except MemoryError:
        reason = f"it needs more than {TEMPLATE_BYTES >> 30} GB of memory"
    except Exception as error:
        reason = first_line(error)
    raise RowError(f"turns that the chat template refuses ({reason})", rules.TURNS)


def unrendered_parts(
    conversation: Conversation, text: str, render: Callable[[Conversation], str]
) -> Iterator[str]:
    """Yield each part of a conversation that `text`, the rendered conversation, does not show.

    To test a part, the conversation is rendered without it. The template shows the part if the text
    changes or if the rendering fails.
    """
    for part, other in (
        (TOOLS, replace(conversation, tools=())),
        (CALLS, _without(conversation, "assistant", "tool_calls")),
        (RESULTS, _without(conversation, "tool", "content")),
    ):
        with suppress(RowError):
            if other != conversation and render(other) == text:
                yield part
    if any(None in map(arguments_of, _calls(message)) for message in conversation.messages):
        yield ARGUMENTS


def _without(conversation: Conversation, role: str, key: str) -> Conversation:
    messages = (
        message if message["role"] != role or not message.get(key) else {**message, key: None}
        for message in conversation.messages
    )
    return replace(conversation, messages=tuple(messages))


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
    served: dict[str, object] = {}
    if calls := _calls(message):
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
    """Yield the parts of a message's content: texts, pictures, and references to tools by name."""
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content or ():
        if isinstance(part, str):
            yield {"type": "text", "text": part}
        elif not isinstance(part, Mapping):
            raise RowError(
                f"a content part of type {type(part).__name__} instead of text or an object"
            )
        elif part == PICTURE:
            yield PICTURE
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
        raise RowError(f"a content part of type {kind!r} instead of {', '.join(_TEXT_OF_PART)}")
    text = part.get(_TEXT_OF_PART[kind])
    if text is not None and not isinstance(text, str):
        raise RowError(
            f"a content part with {_TEXT_OF_PART[kind]} of type {type(text).__name__}, not text"
        )
    return text


def _join_parts(parts: Sequence[Message]) -> str:
    """Return the parts as text. Pictures come first, as in vLLM."""
    texts = [
        str(part["text"] if part["type"] == "text" else part["name"])
        for part in parts
        if part is not PICTURE
    ]
    return "\n".join([PICTURE_MARK] * (len(parts) - len(texts)) + texts)


def _without_billing_header(parts: Sequence[Message]) -> Iterator[Message]:
    for part in parts:
        text = part.get("text")
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest}


def _calls(message: Message) -> Sequence[Message]:
    return message.get("tool_calls") or () if message["role"] == "assistant" else ()


def _served_call(call: Message) -> Message:
    """Return a tool call with its arguments as an object, as templates expect.

    Arguments that are not a JSON object become an empty object, as in vLLM.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RowError("a tool call that is not an object with a function")
    if call.get("type", "function") != "function":
        raise RowError(f"a tool call of type {call.get('type')!r} instead of function")
    return {**call, "function": {**function, "arguments": arguments_of(call) or {}}}


def arguments_of(call: Message) -> Message | None:
    """Return the arguments of a call as an object.

    Returns None if the arguments are neither an object nor the JSON text of an object.
    """
    arguments = call["function"].get("arguments")
    if not arguments:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, Mapping) else None


def _with_single_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join the messages of system and developer into a single system message in front.

    The content of a single message in front stays as it is.
    """
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message not in systems]
    if systems == messages[:1]:
        kept = {key: value for key, value in systems[0].items() if key != "tools"}
        return [{**kept, "role": "system"}, *others]
    contents = [message["content"] for message in systems]
    texts = [text if isinstance(text, str) else _join_parts(text) for text in contents]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
    """Return `openai` if a template loops over the parts of a message's content, otherwise
    `string`.

    vLLM decides this by the template's syntax tree. The result is also `string` if vLLM cannot
    parse or analyze the template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment
    try:
        return "openai" if _loops_over_content(environment.parse(template)) else "string"
    except Exception:  # rendering reports errors in the template
        return "string"


def _loops_over_content(root: nodes.Template) -> bool:
    """Return True if a loop iterates over `message.content`, or over a macro's parameter
    that receives it.
    """
    lists = _aliases(root, _variable("messages"))
    loops = list(root.find_all(nodes.For))
    items = [_variable(_name(loop.target)) for loop in loops if _bare(loop.iter) in lists]
    contents: list[nodes.Node | None] = []
    for item in items:
        contents.append(nodes.Getattr(item, "content", "load"))
        contents.append(nodes.Getitem(item, nodes.Const("content"), "load"))
    names = {id(loop): [_variable("content")] for loop in loops}
    for macro in root.find_all(nodes.Macro):
        parameters = list(map(_variable, _parameters_with(contents, macro, root)))
        names |= {id(loop): parameters for loop in macro.find_all(nodes.For)}
    for loop in loops:
        if _bare(loop.iter) in contents or loop.iter in names[id(loop)]:
            return bool(_name(loop.target))
    return False


def _parameters_with(
    values: Sequence[nodes.Node | None], macro: nodes.Macro, root: nodes.Template
) -> Iterator[str]:
    """Yield the parameters of a macro that receive one of the values in any call."""
    parameters = [argument.name for argument in macro.args]
    for call in root.find_all(nodes.Call):
        if call.node != _variable(macro.name):
            continue
        named = ((pair.key, pair.value) for pair in call.kwargs)
        for name, value in chain(zip(parameters, call.args, strict=False), named):
            if _bare(value) in values:
                yield name


def _aliases(root: nodes.Template, variable: nodes.Name) -> Sequence[nodes.Node | None]:
    """Return a variable, and the variables to which it is assigned, also sliced or filtered."""
    variables = [variable]
    for each in variables:  # the list grows during the loop
        for assignment in root.find_all(nodes.Assign):
            if _bare(assignment.node) == each:
                target = _variable(_name(assignment.target))
                variables += [target] if target not in variables else []
    return variables


def _variable(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _name(node: nodes.Node) -> str:
    """Return the name of a variable. vLLM cannot analyze assignments to anything else, either."""
    assert isinstance(node, nodes.Name)
    return node.name


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Return an expression without filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
