"""Words that messages share: values as text, numbers with nouns, and lists of names."""

import json
from collections.abc import Sequence

# Maximum length of a value of a config in a message.
_MOST_JSON = 80
# Whole numbers from _MIN_SHORTENED on are shown in short form, and from _LARGEST_FLOAT on as their
# number of bits.
_MIN_SHORTENED, _LARGEST_FLOAT = 10**9, 10**300
# Longest word, in characters. A longer run without spaces is cut in the middle.
_LONGEST_WORD = 60


def clip(text: str, limit: int) -> str:
    """Shorten `text` to its beginning and its end if it has more than `limit` characters.

    Keep at most `limit` characters, cut between words if possible, and put the number of removed
    characters in the middle. The end is kept because it often matters most: a prompt ends with its
    question.
    """
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 3], text[limit // 3 - limit :]
    if not text[len(head)].isspace() and (end := head.rfind(" ", -_LONGEST_WORD)) > 0:
        head = head[:end]
    if not text[-len(tail) - 1].isspace() and (start := tail.find(" ", 0, _LONGEST_WORD)) >= 0:
        tail = tail[start + 1 :]
    head, tail = head.rstrip(), tail.lstrip()
    return f"{head} [... {len(text) - len(head) - len(tail)} characters ...] {tail}"


def shown(value: object, limit: int = 300) -> str:
    """Return the `repr` of a value, clipped to `limit` characters.

    If `repr` fails, for example for an integer of more than 4,300 digits, return a text with the
    value's type.
    """
    try:
        return clip(repr(value), limit)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to show"


def as_json(value: object) -> str:
    """Return a value of a config as JSON, with at most 80 characters.

    Large numbers are shown in short form.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _MIN_SHORTENED:
        # Larger numbers do not fit a float, and Python refuses to print numbers with thousands
        # of digits.
        return (
            f"{value:.6g}"
            if abs(value) < _LARGEST_FLOAT
            else f"a number of {value.bit_length()} bits"
        )
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_JSON else f"{text[: _MOST_JSON - 1]}…"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return `1 error` or `2 errors`. `nouns` is the plural of irregular nouns."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or f'{noun}s'}"


def listed(names: Sequence[str], word: str) -> str:
    """Return `X`, `X or Y`, or `X, Y or Z` for the word "or"."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def first_and_more(names: Sequence[str]) -> str:
    """Return `X`, or `X and 2 more` for three names."""
    first, *others = names
    return f"{first} and {len(others):,} more" if others else first


def alternatives(names: Sequence[str]) -> str:
    """Return `X`, `X or Y`, or `X, Y or Z`."""
    return listed(names, "or")
