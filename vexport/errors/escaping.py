"""Text from a checkpoint, a model or a data set, made harmless before it meets a format's own escaping."""

import re

# C0 and C1 controls, DEL, lone surrogates, non-characters, line separators, zero-width and bidi marks:
# illegal in XML, commands to a terminal, or able to make text read as something else.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
# What is longer without a space is no word, and is cut where the limit is.
_LONGEST_WORD = 60
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def visible(text: str, keep: str = "") -> str:
    r"""`text` with control and invisible characters written out (`\x1b`, `\u202e`), but those in `keep`."""
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else _spelled(match[0]), text)


def clip(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, whole words where there are spaces between them.

    The middle goes, since questions and answers stand at the end.
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


def _spelled(character: str) -> str:
    code = ord(character)
    return _NAMED.get(character, f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def first_line(error: BaseException) -> str:
    """The first line of what another library raised, printable and short; the class where it says nothing."""
    line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return "".join(each if each.isprintable() else "?" for each in line)[:200]
