"""Words that messages share: values as text, numbers with nouns, and lists of names."""

from collections.abc import Sequence

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


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return `1 error` or `2 errors`. `nouns` is the plural of irregular nouns."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or f'{noun}s'}"


def listed(names: Sequence[str], word: str) -> str:
    """Return `X`, `X or Y`, or `X, Y or Z` for the word "or"."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def alternatives(names: Sequence[str]) -> str:
    """Return `X`, `X or Y`, or `X, Y or Z`."""
    return listed(names, "or")
