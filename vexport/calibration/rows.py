"""Read rows of calibration data in their usual forms as text, a conversation or token ids.

Conversations in any known spelling become messages of OpenAI's chat API. `conversations.py` changes
such messages as vLLM does before it renders them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import TypeGuard

from vexport.calibration.conversations import (
    Conversation,
    Message,
    MultimodalRowError,
    media_of_part,
)
from vexport.errors import clip

CONVERSATIONS = ("messages", "conversations", "conversation")
# Further columns that hold conversations. A column `text` takes precedence over them.
_CONVERSATION_COLUMNS = (
    "dialog",
    "dialogue",
    "dialogs",
    "chat",
    "chats",
    "turns",
    "chosen",
    "prompt",
)
_ANSWERS_OF_PROMPT = ("completion", "response")
_QUESTIONS = ("instruction", "query", "question", "prompt", "problem", "input", "inputs", "user")
_ANSWERS = (
    "output",
    "response",
    "answer",
    "completion",
    "solution",
    "target",
    "targets",
    "chosen",
    "assistant",
)
# Text that belongs to a question: Alpaca's input, Dolly's context.
_CONTEXTS = ("input", "context")
_SYSTEM = ("system", "system_prompt")
# Column with 0 for each token that is padding.
MASK = "attention_mask"
# Keys under which logs of OpenAI's API store the request.
_REQUESTS = ("body", "request", "kwargs")
# Speakers as ShareGPT, other data sets and other APIs name them, with their roles in OpenAI's API.
_SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bard", "bing", "assistant", "model", "ai", "bot"), "assistant"
    ),
    **dict.fromkeys(
        ("observation", "function_response", "function-response", "tool_response"), "tool"
    ),
}
_CALL_ROLES = ("function_call", "function-call", "tool_call", "tool-call")
_ROLE_KEYS = ("role", "from", "speaker")
_CONTENT_KEYS = ("content", "value", "text", "parts")
# Matches text that starts like a JSON object or a list of objects, also with Python's quotes.
_JSON_OF_OBJECTS = re.compile(r"\s*(\[\s*)?\{\s*['\"]")
# Roles that may have an empty turn: a call without text, or an empty result.
_ROLES_WITHOUT_CONTENT = ("assistant", "tool")
_MEDIA_COLUMN = re.compile(
    r"(image|img|picture|photo|video|audio|pixel_value)s?(_(url|path|file|bytes|base64|data)s?)?",
    re.IGNORECASE,
)
# A placeholder of an image, a video or sound: <image>, <image_1>, <|image_pad|>, <start_of_image>.
_TAG = r"<\|?(?:[a-z]+_)*(?:image|img|vision|video|audio|speech)(?:here|_[a-z0-9_]+| ?\d+)?\|?>"
_ANY_PLACEHOLDER = re.compile(_TAG, re.IGNORECASE)
# Matches placeholders at the usual positions in data for multimodal models: at the start or the end
# of a turn, alone on a line, or around a path.
_PLACEHOLDER = re.compile(
    rf"\A\s*{_TAG}|{_TAG}\s*\Z|^[ \t]*{_TAG}[ \t]*$|<img>[^<>\n]+</img>",
    re.MULTILINE | re.IGNORECASE,
)


class UnknownFormError(ValueError):
    """A row without a known key for text, a conversation or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Content of a row: exactly one of `ids`, `conversation` and `text`.

    `plain_text` is the text to use for a conversation if the model has no chat template. If it is
    None, a model without a template cannot use the row. `unused` names the columns with a value for
    each token that calibration does not use, such as `labels`.
    """

    ids: tuple[int, ...] | None = None
    conversation: Conversation | None = None
    text: str | None = None
    plain_text: str | None = None
    unused: tuple[str, ...] = ()

    def texts(self) -> Iterator[str]:
        """Yield all strings of the row, before a chat template adds further text."""
        if self.text is not None:
            yield self.text
        if self.conversation is not None:
            yield from _strings(self.conversation.messages)
            yield from _strings(self.conversation.tools)


def read_row(raw: object, column: str | None) -> Row:
    """Read a JSON object or a record of a data set.

    Raises ValueError for a broken row, UnknownFormError for a row of an unknown form, and
    MultimodalRowError for a row with an image, a video or sound.
    """
    if isinstance(raw, list) and raw and all(map(_is_turn, raw)):
        raw = {CONVERSATIONS[0]: raw}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{_json_kind(raw)} instead of a JSON object")
    if column is not None:
        if column not in raw:
            raise UnknownFormError(f"no column {column}; the columns are {_keys(raw)}")
        row = _row_of_column(raw, column)
    else:
        row = _row_by_usual_keys(raw)
    _refuse_media(raw, row, column)
    return row


def is_row(raw: object, column: str | None = None) -> bool:
    """Return True if a value has a known form of a row, even if the row is broken."""
    try:
        read_row(raw, column)
    except UnknownFormError:
        return False
    except ValueError:
        return isinstance(raw, Mapping)
    return True


def key_of_rows(value: Mapping[str, object] | Mapping[object, object]) -> object:
    """Return the first key with a list of objects that are not turns of a conversation, or None."""
    for key, items in value.items():
        is_list = isinstance(items, list) and all(isinstance(item, Mapping) for item in items)
        if (
            isinstance(items, list)
            and items
            and is_list
            and not {"role", "from"}.intersection(items[0])
        ):
            return key
    return None


def _row_by_usual_keys(raw: Mapping[object, object]) -> Row:
    """Read a row by its keys. Unambiguous keys take precedence."""
    column = next((key for key in ("input_ids", *CONVERSATIONS) if raw.get(key) is not None), None)
    if column is not None:
        return _row_of_column(raw, column)
    answer = next((key for key in _ANSWERS_OF_PROMPT if raw.get(key) is not None), None)
    if raw.get("prompt") is not None and answer is not None:
        return _row_of_pair(raw, "prompt", answer)
    if raw.get("text") is not None:
        return _row_of_column(raw, "text")
    return _row_by_other_keys(raw)


def _row_by_other_keys(raw: Mapping[object, object]) -> Row:
    """Read a row without any of the usual keys.

    Raises UnknownFormError if the row has no known key at all.
    """
    for question, answer in product(_QUESTIONS, _ANSWERS):
        if question != answer and all(
            isinstance(raw.get(key), str | list) for key in (question, answer)
        ):
            return _row_of_pair(raw, question, answer)
    column = next((key for key in _CONVERSATION_COLUMNS if isinstance(raw.get(key), list)), None)
    if column is not None:
        return _row_of_column(raw, column)
    if _is_turn(raw):
        return _row_of_column({CONVERSATIONS[0]: [raw]}, CONVERSATIONS[0])
    for key in _REQUESTS:
        request = raw.get(key)
        if isinstance(request, Mapping) and request.get("messages") is not None:
            return _row_of_log(raw, request)
    raise UnknownFormError(_describe_unknown_row(raw))


def _describe_unknown_row(raw: Mapping[object, object]) -> str:
    """Describe a row of an unknown form for an error message."""
    if not raw:
        return "an empty object"
    if len(raw) == 1 and (key := key_of_rows(raw)) is not None:
        number = len(raw[key])  # type: ignore[arg-type]
        return (
            f"an object with a list of {number:,} objects under the key {key}, instead of one "
            f"object per line"
        )
    return f"a row with the keys {_keys(raw)}"


def _row_of_column(raw: Mapping[object, object], key: str) -> Row:
    """Read the value of a column: a string, token ids or turns."""
    value = _parsed_turns(raw[key], key)
    if isinstance(value, str):
        return Row(text=value)
    if isinstance(value, Mapping) and _is_turn(value):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{key} with {_json_kind(value)} instead of a string or a list")
    if (value or key == "input_ids") and all(type(item) is int for item in value):
        return _row_of_tokens(raw, key, value)
    if key == "input_ids":
        raise ValueError("input_ids that are not a list of integers")
    return Row(conversation=_conversation(raw, list(_messages(value, key))))


def _row_of_tokens(raw: Mapping[object, object], key: str, ids: Sequence[int]) -> Row:
    """Read token ids without the tokens that the row's attention mask hides."""
    mask = raw.get(MASK)
    of_tokens = [
        str(name)
        for name, values in raw.items()
        if name not in (key, MASK) and _is_list_of_numbers(values) and len(values) == len(ids)
    ]
    if mask is None or (key != "input_ids" and not _has_length(mask, len(ids))):
        return Row(ids=tuple(ids), unused=tuple(of_tokens))
    if not _is_list_of_numbers(mask):
        raise ValueError(f"{MASK} that is not a list of numbers")
    if len(mask) != len(ids):
        raise ValueError(f"{MASK} with {len(mask):,} values for {len(ids):,} {key}")
    visible = tuple(token for token, is_visible in zip(ids, mask, strict=True) if is_visible)
    if ids and not visible:
        raise ValueError(f"{MASK} that hides all tokens")
    return Row(ids=visible, unused=tuple(of_tokens))


def _is_list_of_numbers(value: object) -> TypeGuard[Sequence[float]]:
    return isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _parsed_turns(value: object, key: str) -> object:
    """Return the turns of a column that stores them as JSON text.

    Return any other value unchanged.
    """
    if not isinstance(value, str) or not _JSON_OF_OBJECTS.match(value):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        if key in CONVERSATIONS:
            raise ValueError(
                f"{key} with text that is not valid JSON: {clip(value.strip(), 60)!r}"
            ) from None
        return value
    turns = [parsed] if isinstance(parsed, Mapping) else parsed
    is_conversation = key in CONVERSATIONS or (bool(turns) and all(map(_is_turn, turns)))
    return turns if is_conversation else value


def _row_of_pair(raw: Mapping[object, object], question: str, answer: str) -> Row:
    """Read a question and its answer: two strings, or two lists of messages."""
    asked, answered = (_parsed_turns(raw[key], key) for key in (question, answer))
    if isinstance(asked, str) and isinstance(answered, str):
        contexts = () if question == "prompt" else _CONTEXTS
        parts = [raw.get(key) for key in contexts if key not in (question, answer)]
        whole = "\n".join(
            [asked, *(part for part in parts if isinstance(part, str) and part.strip())]
        )
        turns = [*_history(raw), _turn("user", whole), _turn("assistant", answered)]
        separator = "" if question == "prompt" else "\n"
        return Row(
            conversation=_conversation(raw, turns), plain_text=f"{whole}{separator}{answered}"
        )
    lists = [[each] if isinstance(each, Mapping) else each for each in (asked, answered)]
    if isinstance(asked, str) and not isinstance(lists[1], str):
        lists[0] = [_turn("user", asked)]
    if isinstance(answered, str) and not isinstance(lists[0], str):
        lists[1] = [_turn("assistant", answered)]
    if not all(isinstance(each, Sequence) for each in lists):
        raise ValueError(
            f"a {question} and {answer} that are not two strings or two lists of messages"
        )
    messages = [
        message
        for key, part in zip((question, answer), lists, strict=True)
        for message in _messages(part, key)  # type: ignore[arg-type]
    ]
    return Row(conversation=_conversation(raw, messages))


def _row_of_log(raw: Mapping[object, object], request: Mapping[object, object]) -> Row:
    """Read a logged request, and the logged response to it if there is any."""
    messages = list(_messages(_as_list(request["messages"], "messages"), "messages"))
    response = raw.get("response")
    if isinstance(response, Mapping):
        body = response.get("body")
        choices = (body if isinstance(body, Mapping) else response).get("choices")
        first = choices[0] if isinstance(choices, Sequence) and choices else None
        if isinstance(first, Mapping) and isinstance(first.get("message"), Mapping):
            messages += _messages([first["message"]], "response")
    return Row(conversation=_conversation(request, messages))


def _history(raw: Mapping[object, object]) -> Iterator[Message]:
    """Yield the earlier turns of an instruction. Data sets in Alpaca's form store them as pairs."""
    history = raw.get("history")
    for pair in history if isinstance(history, list) else ():
        if (
            isinstance(pair, Sequence)
            and len(pair) == 2
            and all(isinstance(text, str) for text in pair)
        ):
            yield _turn("user", pair[0])
            yield _turn("assistant", pair[1])


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _conversation(raw: Mapping[object, object], messages: Sequence[Message]) -> Conversation:
    """Return a row's messages and tools. Prepend the system prompt if another column has it."""
    if not messages:
        raise ValueError("a conversation without turns")
    if messages[0]["role"] != "system":
        system = next(
            (raw[key] for key in _SYSTEM if isinstance(raw.get(key), str) and raw[key]), None
        )
        if isinstance(system, str):
            messages = [_turn("system", system), *messages]
    value = next(
        (raw[key] for key in ("tools", "functions") if raw.get(key) not in (None, "", [])), None
    )
    tools = () if value is None else tuple(map(_tool, _as_list(value, "tools")))
    return Conversation(messages=tuple(messages), tools=tools)


def _tool(value: object) -> Message:
    """Return a tool in the form in which vLLM's `ChatCompletionToolsParam` passes it
    to the template.
    """
    tool = _parsed(value, "tools")
    if not isinstance(tool, Mapping):
        raise ValueError(f"tools with {_json_kind(tool)} instead of an object")
    function = _parsed(tool.get("function", tool), "tools")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("tools with an entry without a function name")
    parameters = _parsed(function.get("parameters"), "tools")
    passed: dict[str, object] = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": parameters,
    }
    for key in ("strict", "defer_loading"):
        if function.get(key) is not None:
            passed[key] = function[key]
    return {"type": "function", "function": passed}


def _parsed(value: object, key: str) -> object:
    """Return the value, decoded if it is stored as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(
            f"{key} with text that is not valid JSON: {clip(value.strip(), 60)!r}"
        ) from None
    return parsed


def _as_list(value: object, key: str) -> Sequence[object]:
    parsed = _parsed(value, key)
    if isinstance(parsed, Mapping):
        return [parsed]
    if not isinstance(parsed, Sequence):
        raise ValueError(f"{key} with {_json_kind(parsed)} instead of a list")
    return parsed


def _is_turn(item: object) -> bool:
    """Return True if a value is an object with a speaker, and with content or a tool call."""
    if not isinstance(item, Mapping):
        return False
    has_role = any(isinstance(item.get(key), str) for key in ("role", "from"))
    return has_role and any(key in item for key in (*_CONTENT_KEYS, "tool_calls", "function_call"))


def _messages(items: Sequence[object], key: str) -> Iterator[Message]:
    """Yield turns as messages of OpenAI's API. Consecutive tool calls become a single message."""
    calls: Message | None = None
    for item in items:
        if not isinstance(item, Mapping):
            raise ValueError(
                f"{key} with {_json_kind(item)} instead of a turn with role and content"
            )
        if _is_call(item):
            made = _calls_of_text(_content(item))
            before = calls.get("tool_calls") if calls is not None else None
            if isinstance(before, list) and isinstance(made.get("tool_calls"), list):
                made = {**made, "tool_calls": [*before, *made["tool_calls"]]}  # type: ignore[misc]
            elif calls is not None:
                yield calls
            calls = made
            continue
        if calls is not None:
            yield calls
            calls = None
        yield from _message(item, key)
    if calls is not None:
        yield calls


def _message(item: Mapping[object, object], key: str) -> Iterator[Message]:
    """Yield the message of a turn, or two messages if the turn holds a question and its answer."""
    speaker = next((item[name] for name in _ROLE_KEYS if isinstance(item.get(name), str)), None)
    if speaker is None:
        pair = [
            (role, item[name])
            for names, role in (
                (("human", "user"), "user"),
                (("assistant", "gpt", "bot"), "assistant"),
            )
            for name in names
            if isinstance(item.get(name), str)
        ]
        if len(pair) != 2:
            raise ValueError(
                f"{key} with a turn without role and content (or from and value): {_keys(item)}"
            )
        yield from (_turn(role, str(text)) for role, text in pair)
        return
    role = _SPEAKERS.get(str(speaker).lower(), str(speaker))
    content = _content(item)
    known = (*_ROLE_KEYS, *_CONTENT_KEYS)
    more = {
        str(name): value
        for name, value in item.items()
        if name not in known and not _is_missing(value)
    }
    calls = _calls(more.pop("tool_calls", None), more.pop("function_call", None))
    if role == "function":
        role = "tool"  # older data has this role for results of tools
    if role == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str | list) and content is not None:
        raise ValueError(
            f"{key} with a {role} turn whose content is {_json_kind(content)} instead of text or a "
            f"list of parts"
        )
    if content is None and role not in _ROLES_WITHOUT_CONTENT:
        raise ValueError(f"{key} with a {role} turn without content: {_keys(item)}")
    yield {"role": role, "content": content, **more, **({"tool_calls": calls} if calls else {})}


def _is_call(item: Mapping[object, object]) -> bool:
    """Return True if a turn's role marks it as a tool call, as in ShareGPT data with tools."""
    return any(
        isinstance(item.get(key), str) and str(item[key]).lower() in _CALL_ROLES
        for key in _ROLE_KEYS
    )


def _content(item: Mapping[object, object]) -> object:
    """Return the content of a turn, or None if the turn is empty."""
    content = next((item[name] for name in _CONTENT_KEYS if item.get(name) is not None), None)
    return None if _is_missing(content) else content


def _is_missing(content: object) -> bool:
    """Return True if a content is null, or NaN (pandas writes NaN for null)."""
    return content is None or (isinstance(content, float) and content != content)


def _calls(calls: object, legacy: object) -> list[Message]:
    """Return tool calls in the form of OpenAI's API.

    `legacy` is the value of `function_call` in older logs.
    """
    listed = (
        list(_as_list(calls, "tool_calls"))
        if calls not in (None, "") and not _is_missing(calls)
        else []
    )
    if legacy not in (None, "", {}) and not _is_missing(legacy):
        listed += _as_list(legacy, "function_call")
    made: list[Message] = []
    for value in listed:
        call = _parsed(value, "tool_calls")
        if (
            isinstance(call, Mapping)
            and "function" not in call
            and isinstance(call.get("name"), str)
        ):
            arguments = call.get("arguments", call.get("args", call.get("parameters")))
            identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            call = {
                **identity,
                "type": "function",
                "function": {"name": call["name"], "arguments": arguments},
            }
        if not isinstance(call, Mapping):
            raise ValueError(f"tool_calls with {_json_kind(call)} instead of an object")
        made.append({key: value for key, value in call.items() if value is not None})
    return made


def _calls_of_text(content: object) -> Message:
    """Return the message of a ShareGPT turn `function_call`: its tool calls, or its text if it has
    no valid calls.
    """
    try:
        calls = _calls(content, None)
    except ValueError:
        calls = []
    if calls and all("function" in call for call in calls):
        return {"role": "assistant", "content": None, "tool_calls": calls}
    return _turn("assistant", str(content or ""))


def _refuse_media(raw: Mapping[object, object], row: Row, column: str | None) -> None:
    """Raise MultimodalRowError if a row has an image, a video or sound: as a column, as a content
    part or as a placeholder.

    If the user named the column with the text, other columns count only if the text has a
    placeholder.
    """
    if row.ids is not None:
        return
    if (key := _media_column(raw, column)) is not None and (
        column is None or any(map(_ANY_PLACEHOLDER.search, _contents(row)))
    ):
        raise MultimodalRowError(key)
    for message in row.conversation.messages if row.conversation is not None else ():
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        media = (media_of_part(part) for part in parts if isinstance(part, Mapping))
        marks = map(_placeholder, _strings(content))
        if found := next(filter(None, chain((_media_column(message, None),), media, marks)), None):
            raise MultimodalRowError(found)


def _media_column(raw: Mapping[object, object] | Message, column: str | None) -> str | None:
    """Return the first key with images, video or sound, except for the column of the text."""
    for key, value in raw.items():
        is_named = isinstance(key, str) and key != column and _MEDIA_COLUMN.fullmatch(key)
        is_empty = value in (None, "", [], {}) or isinstance(value, bool | int | float)
        if isinstance(key, str) and is_named and not is_empty:
            return key
    return None


def _placeholder(text: str) -> str | None:
    """Return the first placeholder in a turn, or None.

    An HTML tag with a closing tag is not a placeholder, except for `<img>`.
    """
    for found in _PLACEHOLDER.finditer(text):
        mark = found[0].strip()
        if f"</{mark[1:]}" not in text or mark.lower() == "<img>":
            return mark
    return None


def _contents(row: Row) -> Iterator[str]:
    if row.text is not None:
        yield row.text
    for message in row.conversation.messages if row.conversation else ():
        yield from _strings(message.get("content"))


def texts_of_turns(conversation: Conversation) -> Iterator[str]:
    """Yield the text of each turn that has text."""
    for message in conversation.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if text := "\n".join(text for text in texts if isinstance(text, str)):
            yield text


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _keys(raw: Mapping[object, object]) -> str:
    names = [clip(str(name), 40) for name in list(raw)[:10]]
    return ", ".join(names) + (f" and {len(raw) - 10} more" if len(raw) > 10 else "") or "none"


def _json_kind(value: object) -> str:
    """Return the JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, Mapping) else "a list"
