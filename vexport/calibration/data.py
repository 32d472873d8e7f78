"""Calibration samples: JSONL rows turned into token ids."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import transformers

from vexport.errors import InputError, raise_all
from vexport.files import digest_bytes, require_fetched

KEYS = ("input_ids", "messages", "text")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that calibration calls."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(
        self, conversation: object, *, tokenize: bool, return_dict: bool
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Token ids of each sample and the line (from 1) that it came from."""

    token_ids: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids."""
        return digest_bytes(json.dumps(self.token_ids).encode())


def read_samples(
    path: Path,
    checkpoint: Path,
    *,
    samples: int,
    seq_len: int,
    vocab_size: int,
    trust_remote_code: bool = False,
) -> Samples:
    """The first `samples` rows of a JSONL file as token ids, each cut to `seq_len` tokens.

    A row has `text`, `messages` (the tokenizer's chat template is applied) or `input_ids`. Every broken row
    of the file is reported at once. Raises InputError.
    """
    rows = parse_rows(path)
    if not rows:
        raise InputError(
            str(path), got="no row", need="JSONL rows with text, messages or input_ids", fix="add samples"
        )
    chosen = dict(list(rows.items())[:samples])
    tokenizer = None
    if not all("input_ids" in row for row in chosen.values()):
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    token_ids, lines, problems = [], [], []
    for line, row in chosen.items():
        try:
            ids = _tokenize(row, tokenizer)[:seq_len]
            _require_ids(ids, vocab_size)
            token_ids.append(tuple(ids))
            lines.append(line)
        except ValueError as error:
            problems.append(_broken(path, line, str(error)))
    raise_all(problems)
    return Samples(token_ids=tuple(token_ids), rows=tuple(lines))


def load_tokenizer(checkpoint: Path, *, trust_remote_code: bool) -> Tokenizer:
    """The checkpoint's tokenizer; InputError where it has none that transformers can load."""
    load = transformers.AutoTokenizer.from_pretrained
    try:
        tokenizer: Tokenizer = load(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            str(checkpoint),
            got=f"no usable tokenizer ({str(error).splitlines()[0]})",
            need="the tokenizer of the model",
            fix="add its files, or give calibration rows as input_ids",
        ) from None
    return tokenizer


def parse_rows(path: Path) -> dict[int, Mapping[str, object]]:
    """The JSON objects of a JSONL file by line number (from 1); blank lines are passed over."""
    require_fetched([path])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise InputError(str(path), got=reason, need="a JSONL file", fix="check the path") from None
    rows: dict[int, Mapping[str, object]] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows[number] = _parse_row(line)
        except ValueError as error:
            problems.append(_broken(path, number, str(error)))
    raise_all(problems)
    return rows


def _parse_row(line: str) -> Mapping[str, object]:
    row = json.loads(line)
    if not isinstance(row, dict) or not any(key in row for key in KEYS):
        raise ValueError("a row without text, messages or input_ids")
    return row


def _tokenize(row: Mapping[str, object], tokenizer: Tokenizer | None) -> Sequence[int]:
    if "input_ids" in row:
        ids = row["input_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise ValueError("input_ids that are no list of integers")
        return ids
    assert tokenizer is not None
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    text = row["text"]
    if not isinstance(text, str):
        raise ValueError("a text that is no string")
    return tokenizer.encode(text)


def _require_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise ValueError("a row without tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"token id {max(ids)} outside the vocabulary of {vocab_size}")


def _broken(path: Path, line: int, reason: str) -> InputError:
    return InputError(
        f"{path}:{line}",
        got=reason,
        need='a JSON object with "text", "messages" or "input_ids"',
        fix="fix or remove the line",
    )
