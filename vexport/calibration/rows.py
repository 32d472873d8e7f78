"""Read rows of calibration data in their usual forms as text, a conversation or token ids.

Conversations in any known spelling become messages of OpenAI's chat API. `conversations.py` changes
such messages as vLLM does before it renders them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

from vexport.calibration.answers import LOSS_MASK, MARKS
from vexport.calibration.conversations import (
    Conversation,
    Message,
    RowError,
    Span,
    media_of_part,
)
from vexport.records.values import json_type
from vexport.rules import calibration as rules
from vexport.words import clip

if TYPE_CHECKING:
    from vexport.calibration.picture_rows import Picture

CONVERSATIONS = ("messages", "conversations", "conversation")
# Further columns that hold conversations. A column `text` takes precedence over them.
_LISTS_OF_TURNS = ("dialog", "dialogue", "dialogs", "chat", "chats", "turns", "chosen", "prompt")
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
# Text between the turns of a conversation that is read as plain text.
SEPARATOR = "\n\n"
# Column with 0 for each token that is padding.
MASK = "attention_mask"
# Keys under which logs of OpenAI's API store the request.
_REQUESTS = ("body", "request", "kwargs")
_CALL_ROLES = ("function_call", "function-call", "tool_call", "tool-call")
# Speakers as ShareGPT, other data sets and other APIs name them, with their roles in OpenAI's API.
_SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bard", "bing", "assistant", "model", "ai", "bot"), "assistant"
    ),
    **dict.fromkeys(_CALL_ROLES, "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
    "function-response": "tool",
}
_ROLE_KEYS = ("role", "from", "speaker")
_CONTENT_KEYS = ("content", "value", "text", "parts")
# Matches text that starts like a JSON object or a list of objects, also with Python's quotes.
_JSON_OF_OBJECTS = re.compile(r"\s*(\[\s*)?\{\s*['\"]")
# Roles that may have an empty turn: a call without text, or an empty result.
_ROLES_WITHOUT_CONTENT = ("assistant", "tool")
_MEDIA_COLUMN = re.compile(
    r"(image|img|picture|photo|video|audio|pixel_value)s?(?:_?(\d+))?"
    r"(_(url|path|file|bytes|base64|data)s?)?",
    re.IGNORECASE,
)
# A placeholder of an image, a video or sound: <image>, <image 1>, <|image_pad|>, <start_of_image>,
# [IMG].
_TAG = (
    r"(?:<\|?(?:[a-z]+_)*(?:image|img|vision|video|audio|speech)"
    r"(?:here|_[a-z0-9_]+|[ :#-]?\d+)?\|?>|(?-i:\[IMG\]))"
)
_ANY_PLACEHOLDER = re.compile(rf"<img>[^<>\n]+</img>|{_TAG}", re.IGNORECASE)
# Matches placeholders at the usual positions in data for multimodal models: at the start or the end
# of a turn, alone on a line, or around a path.
_PLACEHOLDER = re.compile(
    rf"\A\s*{_TAG}|{_TAG}\s*\Z|^[ \t]*{_TAG}[ \t]*$|<img>[^<>\n]+</img>",
    re.MULTILINE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Content of a row: token ids, a conversation or a text.

    A conversation may also have a text, which a model without a chat template uses. `answers` are
    the parts of the text that answer its other parts. `marks` has the row's columns of
    `answers.MARKS`, unchecked. `hidden` has the places of the tokens that are padding. They are not
    in `ids`. `unused` names other columns with a value for each token. `pictures` are set by
    picture_rows.py, for models that see.
    """

    ids: tuple[int, ...] | None = None
    conversation: Conversation | None = None
    text: str | None = None
    answers: tuple[Span, ...] = ()
    marks: Mapping[str, object] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()
    unused: tuple[str, ...] = ()
    pictures: "tuple[Picture, ...]" = ()

    def texts(self) -> Iterator[str]:
        """Yield all strings of the row, before a chat template adds further text."""
        if self.conversation is None:
            yield self.text or ""
        else:
            yield from _strings((self.conversation.messages, self.conversation.tools))


def read_row(raw: object, column: str | None) -> Row:
    """Read a JSON object or a record of a data set as text."""
    row = parse_row(raw, column)
    refuse_media(raw, row, column)
    return row


def parse_row(raw: object, column: str | None) -> Row:
    """Read the text of a row, which may also have images, video or sound."""
    if _are_turns(raw):
        raw = {CONVERSATIONS[0]: raw}
    if not isinstance(raw, Mapping):
        raise RowError(f"{json_type(raw)} instead of a JSON object")
    if column is not None:
        if column not in raw:
            raise RowError(f"no column {column}; the columns are {_keys(raw)}", rules.ROW_FORM)
        row = _row_of_column(raw, column)
    else:
        row = _row_by_usual_keys(raw)
    return row


def is_row(raw: object, column: str | None = None) -> bool:
    """Return True if a value has a known form of a row, even if the row is broken."""
    try:
        read_row(raw, column)
    except RowError as error:
        return isinstance(raw, Mapping) and error.rule is not rules.ROW_FORM
    return True


def key_of_rows(value: Mapping[str, object] | Mapping[object, object]) -> object:
    """Return the first key with a list of objects that are not turns of a conversation, or None."""
    for key, items in value.items():
        is_list = isinstance(items, list) and all(isinstance(item, Mapping) for item in items)
        if is_list and items and not _are_turns(items):
            return key
    return None


def _row_by_usual_keys(raw: Mapping[object, object]) -> Row:
    """Read a row by its keys. Unambiguous keys take precedence."""
    present = [key for key, value in raw.items() if value is not None]
    column = next((key for key in ("input_ids", *CONVERSATIONS) if key in present), None)
    answer = next((key for key in _ANSWERS_OF_PROMPT if key in present), None)
    if column is None and "prompt" in present and answer is not None:
        return _row_of_pair(raw, "prompt", answer)
    if column is None and "text" in present:
        column = "text"
    if column is not None:
        return _row_of_column(raw, column)
    usable = [key for key in present if isinstance(raw[key], str | list)]
    for question, answer in product(_QUESTIONS, _ANSWERS):
        if question != answer and question in usable and answer in usable:
            return _row_of_pair(raw, question, answer)
    return _row_by_other_keys(raw)


def _row_by_other_keys(raw: Mapping[object, object]) -> Row:
    """Read a row without any of the usual keys.

    Raises RowError if the row has no known key at all.
    """
    column = next((key for key in _LISTS_OF_TURNS if isinstance(raw.get(key), list)), None)
    if column is not None:
        return _row_of_column(raw, column)
    if _is_turn(raw):
        return _row_of_column({CONVERSATIONS[0]: [raw]}, CONVERSATIONS[0])
    for request in map(raw.get, _REQUESTS):
        if isinstance(request, Mapping) and request.get("messages") is not None:
            return _row_of_log(raw, request)
    raise RowError(_describe_unknown_row(raw), rules.ROW_FORM)


def _describe_unknown_row(raw: Mapping[object, object]) -> str:
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
    value = _parsed_turns(raw[key], key)
    if isinstance(value, str) and key != "input_ids":
        return Row(text=value)
    if _is_turn(value):
        value = [value]
    if not isinstance(value, Sequence):
        raise RowError(f"{key} with {json_type(value)} instead of a string or a list")
    if (value or key == "input_ids") and all(type(item) is int for item in value):
        return _row_of_tokens(raw, key, value)
    if key == "input_ids":
        raise RowError("input_ids that are not a list of integers")
    return Row(conversation=_conversation(raw, list(_messages(value, key))))


def _row_of_tokens(raw: Mapping[object, object], key: str, ids: Sequence[int]) -> Row:
    """Read token ids without the tokens that the row's attention mask hides."""
    of_tokens = {
        str(name): values
        for name, values in raw.items()
        if name != key and _is_list_of_numbers(values) and len(values) == len(ids)
    }
    mask = of_tokens.pop(MASK, None)
    marks = {name: raw[name] for name in MARKS if raw.get(name) is not None}
    if mask is None and key == "input_ids" and raw.get(MASK) is not None:
        raise RowError(_describe_mask(raw[MASK], len(ids)))
    hidden = frozenset(place for place, is_visible in enumerate(mask or ()) if not is_visible)
    if mask and len(hidden) == len(ids):
        raise RowError(f"{MASK} that hides all tokens")
    visible = tuple(token for place, token in enumerate(ids) if place not in hidden)
    return Row(ids=visible, marks=marks, hidden=hidden, unused=tuple(of_tokens))


def _describe_mask(mask: object, tokens: int) -> str:
    if _is_list_of_numbers(mask):
        return f"{MASK} with {len(mask):,} values for {tokens:,} input_ids"
    return f"{MASK} that is not a list of numbers"


def _is_list_of_numbers(value: object) -> TypeGuard[Sequence[float]]:
    return isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)


def _parsed_turns(value: object, key: str) -> object:
    """Return the turns of a column that stores them as JSON text.

    Return any other value unchanged.
    """
    if not isinstance(value, str) or not _JSON_OF_OBJECTS.match(value):
        return value
    try:
        parsed = _as_list(value, key)
    except RowError:
        if key in CONVERSATIONS:
            raise
        return value
    return parsed if key in CONVERSATIONS or _are_turns(parsed) else value


def _row_of_pair(raw: Mapping[object, object], question: str, answer: str) -> Row:
    asked, answered = (_parsed_turns(raw[key], key) for key in (question, answer))
    text = None
    answers: tuple[Span, ...] = ()
    messages = list[Message]()
    if isinstance(asked, str) and isinstance(answered, str):
        contexts = () if question == "prompt" else _CONTEXTS
        values = [raw.get(key) for key in contexts if key not in (question, answer)]
        more = [value for value in values if isinstance(value, str) and value.strip()]
        asked = "\n".join([asked, *more])
        before = asked + ("" if question == "prompt" else "\n")
        text = before + answered
        answers = ((len(before), len(text)),)
        messages = list(_history(raw))
    for key, role, value in ((question, "user", asked), (answer, "assistant", answered)):
        if isinstance(value, str):
            messages.append(_turn(role, value))
        elif isinstance(value, Mapping | Sequence):
            turns = list(_messages([value] if isinstance(value, Mapping) else value, key))
            messages = _without_repeated_question(messages, turns) + turns
        else:
            raise RowError(
                f"a {question} and {answer} that are not two strings or two lists of messages"
            )
    return Row(conversation=_conversation(raw, messages), text=text, answers=answers)


def _without_repeated_question(
    messages: Sequence[Message], answer: Sequence[Message]
) -> list[Message]:
    """Return the turns before an answer, without the turns that the answer repeats.

    In data of preferences, an answer may be a whole conversation with the question. Then two turns
    of the user would follow each other. The conversation may leave out the system prompt.
    """
    roles = [turn["role"] for turn in answer]
    first = next((role for role in roles if role != "system"), None)
    if not messages or not first == messages[-1]["role"] == "user":
        return [*messages]
    return [turn for turn in messages if turn["role"] == "system" and "system" not in roles]


def _row_of_log(raw: Mapping[object, object], request: Mapping[object, object]) -> Row:
    messages = list(_messages(_as_list(request["messages"], "messages"), "messages"))
    response: Any = raw.get("response")
    try:
        answer = response.get("body", response)["choices"][0]["message"]
    except (AttributeError, KeyError, IndexError, TypeError):
        answer = None
    if isinstance(answer, Mapping):
        messages += _messages([answer], "response")
    return Row(conversation=_conversation(request, messages))


def _history(raw: Mapping[object, object]) -> Iterator[Message]:
    """Yield the earlier turns of an instruction. Data sets in Alpaca's form store them as pairs."""
    history = raw.get("history")
    for pair in history if isinstance(history, list) else ():
        if isinstance(pair, list | tuple) and list(map(type, pair)) == [str, str]:
            yield from map(_turn, ("user", "assistant"), pair)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _conversation(raw: Mapping[object, object], messages: Sequence[Message]) -> Conversation:
    """Return a row's messages and tools. Prepend the system prompt if another column has it."""
    if not messages:
        raise RowError("a conversation without turns")
    mask = raw.get(LOSS_MASK)
    if messages[0]["role"] != "system":
        systems = [raw[key] for key in _SYSTEM if isinstance(raw.get(key), str) and raw[key]]
        messages = [*(_turn("system", str(text)) for text in systems[:1]), *messages]
        if systems and isinstance(mask, list | tuple):
            mask = [0, *mask]
    value = next(
        (raw[key] for key in ("tools", "functions") if raw.get(key) not in (None, "", [])), None
    )
    tools = () if value is None else tuple(map(_tool, _as_list(value, "tools")))
    return Conversation(messages=tuple(messages), tools=tools, loss_mask=mask)


def _tool(value: object) -> Message:
    """Return a tool in the form in which vLLM's `ChatCompletionToolsParam` passes it
    to the template.
    """
    tool = _parsed(value, "tools")
    if not isinstance(tool, Mapping):
        raise RowError(f"tools with {json_type(tool)} instead of an object")
    function = _parsed(tool.get("function", tool), "tools")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("tools with an entry without a function name")
    passed = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": _parsed(function.get("parameters"), "tools"),
    }
    more = {
        key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None
    }
    return {"type": "function", "function": passed | more}


def _parsed(value: object, key: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        raise RowError(
            f"{key} with text that is not valid JSON: {clip(value.strip(), 60)!r}"
        ) from None
    return parsed


def _as_list(value: object, key: str) -> Sequence[object]:
    parsed = _parsed(value, key)
    if isinstance(parsed, Mapping):
        return [parsed]
    if not isinstance(parsed, Sequence):
        raise RowError(f"{key} with {json_type(parsed)} instead of a list")
    return parsed


def _is_turn(item: object) -> bool:
    """Return True if a value is an object with a speaker, and with content or a tool call."""
    if not isinstance(item, Mapping) or str not in map(type, map(item.get, ("role", "from"))):
        return False
    return any(key in item for key in (*_CONTENT_KEYS, "tool_calls", "function_call"))


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _messages(items: Sequence[object], key: str) -> Iterator[Message]:
    """Yield turns as messages of OpenAI's API. Consecutive tool calls become a single message."""
    calls = list[Message]()
    for item in items:
        if not isinstance(item, Mapping):
            raise RowError(f"{key} with {json_type(item)} instead of a turn with role and content")
        found = _calls_of_turn(item)
        if calls and not found:
            yield _calling(calls)
            calls = []
        calls += found
        if not found:
            yield from _message(item, key)
    if calls:
        yield _calling(calls)


def _calling(calls: list[Message]) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _message(item: Mapping[object, object], key: str) -> Iterator[Message]:
    """Yield the message of a turn, or two messages if the turn holds a question and its answer."""
    speaker = _speaker(item)
    if speaker is None:
        texts = {
            _SPEAKERS[str(name)]: text
            for name, text in item.items()
            if name in _SPEAKERS and isinstance(text, str)
        }
        if texts.keys() != {"user", "assistant"}:
            raise RowError(
                f"{key} with a turn without role and content (or from and value): {_keys(item)}"
            )
        yield _turn("user", texts["user"])
        yield _turn("assistant", texts["assistant"])
        return
    role = _SPEAKERS.get(speaker.lower(), speaker)
    content = _content(item)
    known = (*_ROLE_KEYS, *_CONTENT_KEYS)
    more = {
        str(name): value
        for name, value in item.items()
        if name not in known and not _is_missing(value)
    }
    calls = [
        call
        for name in ("tool_calls", "function_call")
        for call in _calls(more.pop(name, None), name)
    ]
    if role == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str | list) and content is not None:
        raise RowError(
            f"{key} with a {role} turn whose content is {json_type(content)} instead of text or a "
            f"list of parts"
        )
    if content is None and role not in _ROLES_WITHOUT_CONTENT:
        raise RowError(f"{key} with a {role} turn without content: {_keys(item)}")
    yield {"role": role, "content": content, **more, **({"tool_calls": calls} if calls else {})}


def _speaker(item: Mapping[object, object]) -> str | None:
    return next((value for key in _ROLE_KEYS if isinstance(value := item.get(key), str)), None)


def _content(item: Mapping[object, object]) -> object:
    content = next((item[name] for name in _CONTENT_KEYS if item.get(name) is not None), None)
    return None if _is_missing(content) else content


def _is_missing(content: object) -> bool:
    """Return True if a content is null, or NaN (pandas writes NaN for null)."""
    return content is None or (isinstance(content, float) and content != content)


def _calls(value: object, key: str) -> Iterator[Message]:
    if not value or _is_missing(value):
        return
    for entry in _as_list(value, key):
        call = _parsed(entry, "tool_calls")
        if not isinstance(call, Mapping):
            raise RowError(f"tool_calls with {json_type(call)} instead of an object")
        if "function" not in call and isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("args", call.get("parameters")))
            identity = call["id"] if isinstance(call.get("id"), str) else None
            function = {"name": call["name"], "arguments": arguments}
            call = {"id": identity, "type": "function", "function": function}
        yield {key: value for key, value in call.items() if value is not None}


def _calls_of_turn(item: Mapping[object, object]) -> list[Message]:
    """Return the calls of a ShareGPT turn `function_call`, or none if it has no valid calls."""
    if (_speaker(item) or "").lower() not in _CALL_ROLES:
        return []
    try:
        calls = list(_calls(_content(item), "tool_calls"))
    except RowError:
        return []
    return calls if all("function" in call for call in calls) else []


def refuse_media(raw: object, row: Row, column: str | None) -> None:
    """Raise RowError if a row has an image, a video or sound: as a column, as a content
    part or as a placeholder.

    If the user named the column with the text, other columns count only if the text has a
    placeholder.
    """
    if row.ids is not None:
        return
    key = _media_column(raw, column) if isinstance(raw, Mapping) else None
    is_shown = column is None or any(map(_ANY_PLACEHOLDER.search, row.texts()))
    found = [key if is_shown else None]
    for message in row.conversation.messages if row.conversation is not None else ():
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found.append(_media_column(message, None))
        found += (media_of_part(part) for part in parts if isinstance(part, Mapping))
        found += map(_placeholder, _strings(content))
    for media in filter(None, found):
        raise RowError(media, rules.NO_TEXT)


def _media_column(raw: Mapping[object, object] | Message, column: str | None) -> str | None:
    """Return the first key with images, video or sound, except for the column of the text."""
    return next((key for key, _ in media_columns(raw) if key != column), None)


def media_columns(
    raw: Mapping[object, object] | Message,
) -> Sequence[tuple[str, object]]:
    """Return the keys with images, video or sound, and their values.

    These are keys with a usual name. If there are none, they are the keys whose values are files as
    `datasets` stores them.
    """
    pairs = [
        (key, value)
        for key, value in raw.items()
        if isinstance(key, str) and not is_empty(value) and not isinstance(value, int | float)
    ]
    named = [pair for pair in pairs if _MEDIA_COLUMN.fullmatch(pair[0])]
    return named or [pair for pair in pairs if _holds_files(pair[1])]


def _holds_files(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(is_stored_file(item) or is_empty(item) for item in items)


def is_stored_file(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return True for an object with bytes and a path, which `datasets` stores for a file."""
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}


def is_empty(value: object) -> bool:
    """Return True for a value without content, such as an empty text, or a list of such values."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    if is_stored_file(value):
        return not any(value.values())
    return value is None or value in ("", b"", {})


def number_of_column(name: str) -> int | None:
    """Return the number in the name of a column such as `image_2`, or None."""
    found = _MEDIA_COLUMN.fullmatch(name.rpartition(".")[2])
    return None if found is None or found[2] is None else int(found[2])


def _placeholder(text: str) -> str | None:
    """Return the first placeholder in a turn, or None."""
    return next((text[begin:end].strip() for begin, end in placeholders(text)), None)


def placeholders(text: str) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of the placeholders in a turn, at the usual positions.

    An HTML tag with a closing tag is not a placeholder, except for `<img>`.
    """
    return _found(_PLACEHOLDER, text)


def tags(text: str) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of the placeholders in a turn, at any position."""
    return _found(_ANY_PLACEHOLDER, text)


def _found(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    for found in pattern.finditer(text):
        mark = found[0].strip()
        if f"</{mark[1:]}" not in text or mark.lower() == "<img>":
            yield found.span()


def as_text(row: Row, conversation: Conversation) -> Row:
    """Return a row with the texts of a conversation's turns as its text."""
    text, answers = "", list[Span]()
    for message in conversation.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if turn := "\n".join(part for part in texts if isinstance(part, str)):
            text += f"{SEPARATOR}{turn}" if text else turn
            if message["role"] == "assistant":
                answers.append((len(text) - len(turn), len(text)))
    return replace(row, text=text, answers=tuple(answers))


def _strings(value: object) -> Iterator[str]:
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
