"""A row of calibration data: text, the turns of a conversation, or token ids, as people have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONVERSATIONS = ("messages", "conversations", "conversation")
FORMS = "text, messages, conversations, prompt and completion, or input_ids"
# ShareGPT's names of who speaks.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one row says: exactly one of `ids`, `messages` and `text`.

    `flat` is the text of a conversation for a model without a chat template; None where that is an error.
    """

    ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    flat: str | None = None


def read_row(raw: object, column: str | None) -> Row:
    """The row that a JSON object or a record of a data set holds; ValueError says what it lacks."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{type(raw).__name__}, no JSON object")
    if column is not None:
        if column not in raw:
            raise ValueError(f"no column {column}, but {', '.join(map(str, list(raw)[:10])) or 'none'}")
        return _of_value(raw[column], column)
    for key in ("input_ids", *CONVERSATIONS):
        if raw.get(key) is not None:
            return _of_value(raw[key], key)
    if raw.get("prompt") is not None and (answer := raw.get("completion", raw.get("response"))) is not None:
        return _of_pair(raw["prompt"], answer)
    if raw.get("text") is not None:
        return Row(text=_string(raw["text"], "text"))
    raise ValueError(f"a row without {FORMS}")


def _of_value(value: object, key: str) -> Row:
    """A column by what is in it: a string, ids or turns."""
    if isinstance(value, str):
        return Row(text=_string(value, key))
    if not isinstance(value, Sequence):
        raise ValueError(f"{key} that is no string and no list")
    numbers = bool(value) and all(type(item) is int for item in value)
    if key == "input_ids" or (numbers and key not in CONVERSATIONS):
        if not all(type(item) is int for item in value):
            raise ValueError("input_ids that are no list of integers")
        return Row(ids=tuple(value))
    return Row(messages=_messages(value, key))


def _of_pair(prompt: object, answer: object) -> Row:
    if isinstance(prompt, str) and isinstance(answer, str):
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return Row(messages=turns, flat=_string(f"{prompt}{answer}", "prompt"))
    if isinstance(prompt, Sequence) and isinstance(answer, Sequence):
        return Row(messages=(*_messages(prompt, "prompt"), *_messages(answer, "completion")))
    raise ValueError("a prompt and a completion that are not two strings or two lists of messages")


def _messages(value: Sequence[object], key: str) -> tuple[Message, ...]:
    if isinstance(value, str) or not value:
        raise ValueError(f"{key} that are no list of messages")
    return tuple(_message(item, key) for item in value)


def _message(item: object, key: str) -> Message:
    """A turn with role and content, also where they are called from and value."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{key} with a turn that is no object with role and content")
    role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise ValueError(f"{key} with a turn that has no role and content (or from and value)")
    if isinstance(content, str):
        _string(content, key)
    more = {name: each for name, each in item.items() if name not in ("role", "from", "content", "value")}
    return {"role": _SPEAKERS.get(role, role), "content": content, **more}


def _string(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {key} that is no string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"a {key} with a lone surrogate, which is no character") from None
    return value
