"""Calibration samples: rows of text, turns of a conversation or token ids, as people have them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from vexport.calibration.sources import RawRow, raw_rows
from vexport.checkpoint.source import DEFAULT
from vexport.errors import InputError, first_line, raise_all
from vexport.files import digest_bytes
from vexport.records import CalibrationData
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit

# Characters read per token: the rest of a text would be cut after tokenizing.
CHARACTERS = 64
# Broken rows after which reading ends.
MOST_BROKEN = 10
CONVERSATIONS = ("messages", "conversations", "conversation")
FORMS = "text, messages, conversations, prompt and completion, or input_ids"
# ShareGPT's names of the speakers.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The content of one row: exactly one of `ids`, `messages` and `text`.

    `flat` is the text of a conversation for a model without a chat template; None where that is an error.
    """

    ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    flat: str | None = None


def read_row(raw: object, column: str | None) -> Row:
    """Parse a JSON object or a record of a data set; ValueError says what it lacks."""
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
        return _of_value(raw["text"], "text")
    raise ValueError(f"a row without {FORMS}")


def _of_value(value: object, key: str) -> Row:
    """Parse the value of a column: a string, ids or turns."""
    if isinstance(value, str):
        return Row(text=value)
    if not isinstance(value, Sequence):
        raise ValueError(f"{key} that is no string and no list")
    if all(type(item) is int for item in value):
        return Row(ids=tuple(value))
    if key == "input_ids":
        raise ValueError("input_ids that are no list of integers")
    return Row(messages=tuple(_message(item, key) for item in value))


def _of_pair(prompt: object, answer: object) -> Row:
    if isinstance(prompt, str) and isinstance(answer, str):
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return Row(messages=turns, flat=f"{prompt}{answer}")
    if isinstance(prompt, Sequence) and isinstance(answer, Sequence):
        parts = (("prompt", prompt), ("completion", answer))
        return Row(messages=tuple(_message(item, key) for key, part in parts for item in part))
    raise ValueError("a prompt and a completion that are not two strings or two lists of messages")


def _message(item: object, key: str) -> Message:
    """A turn with the keys role and content, which ShareGPT calls from and value."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{key} with a turn that is no object with role and content")
    role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise ValueError(f"{key} with a turn that has no role and content (or from and value)")
    more = {name: each for name, each in item.items() if name not in ("role", "from", "content", "value")}
    return {"role": _SPEAKERS.get(role, role), "content": content, **more}


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that calibration calls."""

    eos_token_id: int | None
    chat_template: object

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: object, *, tokenize: bool, return_dict: bool
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Token ids of each sample and the row (from 1) that it came from, or began in; `data` names the set."""

    token_ids: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    data: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids."""
        return digest_bytes(json.dumps(self.token_ids).encode())

    def taken(self, positions: Iterable[int]) -> "Samples":
        """Select the samples at these positions, in their order."""
        positions = tuple(positions)
        return replace(
            self,
            token_ids=tuple(self.token_ids[position] for position in positions),
            rows=tuple(self.rows[position] for position in positions),
        )

    def spread(self, number: int) -> "Samples":
        """Select at most `number` samples, evenly spaced."""
        return self.taken(
            list(dict.fromkeys(position * len(self.rows) // number for position in range(number)))
        )


def read_samples(
    data: CalibrationData, checkpoint: Path, *, vocab_size: int, trust_remote_code: bool = False
) -> Samples:
    """Read rows as token ids, as many and as long as `data` asks for, and no more.

    A row has the forms of `read_row`; turns go through the tokenizer's chat template. Broken rows are
    reported together. Raises InputError, and EnvironmentFault where the hub cannot be asked.
    """
    reader = _Reader(data, checkpoint, vocab_size, trust_remote_code)
    rows = _packed(reader.rows(), data) if reader.packs else reader.rows()
    samples = list(islice(rows, data.samples))
    raise_all(reader.broken)
    if not samples:
        raise InputError(data.name, got="no row", need=f"rows with {FORMS}", fix="add samples")
    return Samples(
        token_ids=tuple(tuple(ids[: data.seq_len]) for _, ids in samples),
        rows=tuple(number for number, _ in samples),
        data=data.name,
    )


def first_texts(data: CalibrationData, most: int) -> list[str]:
    """The texts of the first rows that are text, at most `most`, without a tokenizer."""
    rows = (read_row(_content(raw), data.column) for raw in raw_rows(data))
    texts = (row.text[: CHARACTERS * data.seq_len] for row in rows if row.text is not None)
    return list(islice(texts, most))


class _Reader:
    """Tokenizes the rows of a data set, and collects the errors of broken ones."""

    def __init__(
        self, data: CalibrationData, checkpoint: Path, vocab_size: int, trust_remote_code: bool
    ) -> None:
        self._data, self._vocab_size = data, vocab_size
        self._checkpoint, self._trust = checkpoint, trust_remote_code
        self.broken: list[InputError] = []
        rows = raw_rows(data)
        self._raw = chain(first := list(islice(rows, 1)), rows)
        # Rows are joined if asked, or if they are paragraphs of one text.
        is_text = Path(data.name).suffix.lower() in (".txt", ".md")
        paragraphs = is_text and bool(first) and isinstance(first[0].content, dict)
        self.packs = paragraphs if data.pack is None else data.pack

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint, loaded when the first row needs it."""
        return load_tokenizer(self._checkpoint, trust_remote_code=self._trust)

    def rows(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield each valid row, until there are too many broken ones."""
        for raw in self._raw:
            try:
                yield raw.number, self._tokenized(raw)
            except (ValueError, RecursionError) as error:
                got = "JSON nested too deeply" if isinstance(error, RecursionError) else str(error)
                if isinstance(error, json.JSONDecodeError):
                    got = f"no JSON object ({error.msg} at character {error.pos})"
                need, fix = f"a row with {FORMS}", "fix or remove the row"
                self.broken.append(InputError(raw.place, got=got, need=need, fix=fix))
                if len(self.broken) == MOST_BROKEN:
                    return

    def _tokenized(self, raw: RawRow) -> Sequence[int]:
        row = read_row(_content(raw), self._data.column)
        if self._data.name == DEFAULT and row.messages is not None:
            row = replace(row, flat="\n\n".join(str(turn["content"]) for turn in row.messages))
        most = self._data.seq_len * (self._data.samples if self.packs else 1)
        ids = self._ids(row, most, begins=not (self.packs and raw.joins))
        if not ids:
            raise ValueError("a row without tokens")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"token id {max(ids)} outside the vocabulary of {self._vocab_size}")
        end = self.tokenizer.eos_token_id if self.packs and row.ids is None else None
        return ids if end is None or raw.joins or ids[-1] == end else (*ids, end)

    def _ids(self, row: Row, most: int, *, begins: bool) -> Sequence[int]:
        """The ids of a row, of its text no more than `most` tokens can need; ValueError where it fails.

        `begins` a text of its own. A chat template is a program of the checkpoint that may do anything.
        """
        if row.ids is not None:
            return row.ids
        text = row.text
        if row.messages is not None:
            if self.tokenizer.chat_template:
                turns = _cut(row.messages, CHARACTERS * most)
                try:
                    with time_limit(TEMPLATE_SECONDS):
                        return self.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
                except Exception as error:
                    reason = first_line(error)
                    raise ValueError(f"turns that the chat template refuses ({reason})") from None
            if row.flat is None:
                raise ValueError("turns of a conversation, and the model has no chat template")
            text = row.flat
        assert text is not None
        try:
            return self.tokenizer.encode(text[: CHARACTERS * most], add_special_tokens=begins)
        except Exception as error:
            raise ValueError(f"a text that the tokenizer refuses ({first_line(error)})") from None


def _packed(
    rows: Iterable[tuple[int, Sequence[int]]], data: CalibrationData
) -> Iterator[tuple[int, Sequence[int]]]:
    """Concatenate the rows and cut them into samples of `seq_len` tokens; the rest is the last sample."""
    held, start = list[int](), 0
    for number, ids in rows:
        start = start if held else number
        held.extend(ids)
        while len(held) >= data.seq_len:
            yield start, held[: data.seq_len]
            held, start = held[data.seq_len :], number
    if held:
        yield start, held


def _content(raw: RawRow) -> object:
    """The JSON of a line, or the record as it is. Raises ValueError, RecursionError."""
    return json.loads(raw.content) if isinstance(raw.content, bytes) else raw.content


def _cut(turns: Sequence[Message], characters: int) -> list[Message]:
    """The first turns, cut to at most `characters` characters of text together."""
    kept: list[Message] = []
    for turn in turns:
        content = turn["content"]
        kept.append({**turn, "content": content[:characters]} if isinstance(content, str) else turn)
        characters -= len(content) if isinstance(content, str) else 0
        if characters <= 0:
            break
    return kept


def load_tokenizer(checkpoint: Path, *, trust_remote_code: bool) -> Tokenizer:
    """The checkpoint's tokenizer; InputError where it has none that transformers can load."""
    import transformers

    load = transformers.AutoTokenizer.from_pretrained
    try:
        tokenizer: Tokenizer = load(checkpoint, trust_remote_code=trust_remote_code)
    except Exception as error:
        own_code = "trust_remote_code" in str(error)
        raise InputError(
            str(checkpoint),
            got="a tokenizer with its own code" if own_code else f"no usable tokenizer ({first_line(error)})",
            need="the tokenizer of the model",
            fix="read that code, then add --trust-remote-code"
            if own_code
            else "add its files, or give calibration rows as input_ids",
        ) from None
    return tokenizer
