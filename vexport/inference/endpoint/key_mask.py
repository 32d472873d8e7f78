"""Replace the API key in everything that a server sends, in all spellings of the key.

The server knows the key, and readers of reports and logs do not. A server or a gateway may send the
key back in an error or in a response, escaped for JSON, an address or HTML.
"""

import re

from vexport.records import Json

MASK = "***"
# Minimum length of a key that is masked in responses. Shorter keys would mask ordinary words. In
# messages, keys of any length are masked.
_SHORTEST_MASKED_KEY = 8
# Percent signs and zeros that further levels of escaping add. All repetitions have limits, because
# a server chooses the text.
_PERCENT, _ZEROS = "%(?:25){0,8}", "0{0,8}"
# A backslash, doubled by each further level of JSON, and escaped for an address.
_BACKSLASHES = rf"(?:\\|{_PERCENT}5[cC]){{1,15}}+"


class KeyMask:
    """Masks a key. Without a key, nothing is changed."""

    def __init__(self, key: str) -> None:
        self._spellings = re.compile("".join(map(_spellings, key))) if key else None
        self._masks_content = len(key) >= _SHORTEST_MASKED_KEY

    def message(self, words: str) -> str:
        """Return the words of a message or a name without the key."""
        return self._spellings.sub(MASK, words) if self._spellings else words

    def text(self, text: str) -> str:
        """Return the text of a response without the key, unless the key is an ordinary word."""
        return self.message(text) if self._masks_content else text

    def content(self, value: Json) -> Json:
        """Return parsed JSON with all its texts as `text` returns them.

        Raises RecursionError if the content is nested too deeply.
        """
        if not self._masks_content:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.content(entry) for entry in value]
        if isinstance(value, dict):
            return {self.text(key): self.content(entry) for key, entry in value.items()}
        return value


def _spellings(character: str) -> str:
    """Return a pattern for a character as it is, and escaped for JSON, addresses and HTML."""
    code = ord(character)
    digits = "".join(
        f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in f"{code:02x}"
    )
    spellings = (
        _BACKSLASHES if character == "\\" else re.escape(character),
        f"{_BACKSLASHES}(?:u00|x){digits}",
        f"{_PERCENT}{digits}",
        f"&#(?:{_ZEROS}{code}|[xX]{_ZEROS}{digits});",
        *(f"&{name};" for name in _HTML_NAMES.get(character, ())),
    )
    # JSON may write a backslash before marks, as in \/ and \".
    escape = "" if character.isalnum() or character == "\\" else f"(?:{_BACKSLASHES})?"
    return f"{escape}(?:{'|'.join(spellings)})"


_HTML_NAMES = {
    "&": ("amp",),
    "<": ("lt",),
    ">": ("gt",),
    '"': ("quot",),
    "'": ("apos",),
    "/": ("sol",),
    "+": ("plus",),
    "=": ("equals",),
}
