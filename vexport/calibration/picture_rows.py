"""Find the pictures of a row, and the places of the pictures in its text.

A picture is in a content part (`image_url` and similar types), in a column such as `images`, or
under such a key of a turn. Pictures of a column belong to the placeholders of the text, such as
`<image>`, in their order. Without placeholders they are in front of the first user turn.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vexport.calibration.conversations import (
    PICTURE,
    PICTURE_MARK,
    Message,
    RowError,
    media_of_part,
)
from vexport.calibration.rows import Row, media_columns, placeholders
from vexport.rules import calibration as rules
from vexport.words import plural

# Matches columns, keys and types of content parts for pictures. Video and sound are not read.
_OF_PICTURES = re.compile(r"(input_|output_)?(image|img|picture|photo)s?(_|-|$)", re.IGNORECASE)
_OTHER_PLACEHOLDER = re.compile(r"video|audio|speech", re.IGNORECASE)
# Keys of a content part that hold the picture.
_KEYS = ("image_url", "image", "url", "path", "data", "source", "bytes", "base64")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a row as the data stores it, and its field, such as `images[1]`.

    `stored` is an address, a path, bytes, or an object with bytes and a path.
    """

    field: str
    stored: object


# A place for the next picture of a column.
_Slot = None
_Pictures = list[Picture | None]


class _OtherMedia(Exception):
    """A row with video, sound or a file."""


def row_with_pictures(raw: object, row: Row, column: str | None) -> Row | None:
    """Return a row with its pictures, or None if it has none or has video, sound or a file.

    The pictures are in the order of the text. In the text, PICTURE_MARK is in the place of each
    picture, and in a conversation the part PICTURE.

    Raises RowError if the placeholders and the pictures of a column are not equally many.
    """
    if row.ids is not None:
        return None
    try:
        kept = _pictures_of_columns(raw, column) if isinstance(raw, Mapping) else []
        placed = _placed_in_text(row, kept) if row.conversation is None else _placed(row, kept)
    except _OtherMedia:
        return None
    return placed if placed.pictures else None


def _placed_in_text(row: Row, kept: Sequence[Picture]) -> Row:
    if not kept or row.text is None:
        return row
    return replace(row, text=_marked(row.text, len(kept)), pictures=tuple(kept))


def _placed(row: Row, kept: Sequence[Picture]) -> Row:
    assert row.conversation is not None
    turns = [
        _Turn(message, f"messages[{number}]", has_column=bool(kept))
        for number, message in enumerate(row.conversation.messages)
    ]
    if kept and all(_Slot not in turn.pictures for turn in turns):
        first = next((turn for turn in turns if turn.message["role"] == "user"), turns[0])
        first.prepend(kept)
        kept = ()
    pictures = _filled([picture for turn in turns for picture in turn.pictures], kept)
    if not pictures:
        return row
    messages = tuple({**turn.message, "content": turn.parts} for turn in turns)
    return replace(
        row,
        conversation=replace(row.conversation, messages=messages),
        text=None if row.text is None else _marked(row.text, len(pictures)),
        pictures=tuple(pictures),
    )


class _Turn:
    """A turn of a conversation: its content parts, and its pictures or slots in their order."""

    def __init__(self, message: Message, field: str, *, has_column: bool) -> None:
        own = _pictures_of_columns(message, None, f"{field}.")
        self.message = {key: message[key] for key in message if key not in _own_keys(message)}
        self.parts: list[object] = []
        self.pictures: _Pictures = []
        content = message.get("content")
        for number, part in enumerate([content] if isinstance(content, str) else content or ()):
            self._add(part, f"{field}.content[{number}]", has_slots=has_column or bool(own))
        if own and _Slot in self.pictures:
            self.pictures = [*_filled(self.pictures, own)]
        else:
            self.prepend(own)

    def prepend(self, pictures: Sequence[Picture]) -> None:
        """Put pictures in front of the turn."""
        self.parts[:0] = [PICTURE] * len(pictures)
        self.pictures[:0] = pictures

    def _add(self, part: object, field: str, *, has_slots: bool) -> None:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            self.parts.append(part)
        elif (kind := media_of_part(part)) is not None:
            if not _OF_PICTURES.match(kind):
                raise _OtherMedia
            self.parts.append(PICTURE)
            stored = _stored_in_part(part)
            self.pictures.append(_Slot if stored is None else Picture(field, stored))
        elif has_slots and isinstance(text := part.get("text"), str):
            for piece in _split(text):
                self.parts.append(PICTURE if piece is None else {**part, "text": piece})
                self.pictures += [_Slot] if piece is None else []
        else:
            self.parts.append(part)


def _own_keys(message: Message) -> set[str]:
    return {key for key, _ in media_columns(message)}


def _filled(pictures: _Pictures, kept: Sequence[Picture]) -> list[Picture]:
    """Return pictures with those of a column in the slots."""
    slots = pictures.count(_Slot)
    if slots != len(kept):
        raise _mismatch(slots, len(kept))
    following = iter(kept)
    return [next(following) if picture is None else picture for picture in pictures]


def _marked(text: str, pictures: int) -> str:
    """Return a text with a mark for each picture: at its placeholders, otherwise in front."""
    pieces = _split(text)
    found = pieces.count(_Slot)
    if not found:
        return "\n".join([PICTURE_MARK * pictures, text])
    if found != pictures:
        raise _mismatch(found, pictures)
    return "".join(PICTURE_MARK if piece is None else piece for piece in pieces)


def _mismatch(places: int, pictures: int) -> RowError:
    return RowError(
        f"{plural(places, 'placeholder')} for {plural(pictures, 'picture')}", rules.PICTURE
    )


def _split(text: str) -> list[str | None]:
    """Split a text at its placeholders. A placeholder becomes a slot.

    Line breaks around placeholders and empty texts are left out.
    """
    pieces = list[str | None]()
    start = 0
    for begin, end in placeholders(text):
        if _OTHER_PLACEHOLDER.search(text, begin, end):
            raise _OtherMedia
        pieces += [text[start:begin].strip("\n"), _Slot]
        start = end
    pieces.append(text[start:].strip("\n") if start else text)
    return [piece for piece in pieces if piece != ""]


def _pictures_of_columns(
    raw: Mapping[object, object] | Message, column: str | None, parent: str = ""
) -> list[Picture]:
    """Return the pictures of a row's columns or of a turn's keys.

    If several columns have pictures, as `image` and `image_url`, a column with bytes is preferred.
    """
    columns = [pair for pair in media_columns(raw) if pair[0] != column]
    if not all(_OF_PICTURES.match(name) for name, _ in columns):
        raise _OtherMedia
    lists = [list(_pictures_in(f"{parent}{name}", value)) for name, value in columns]
    return min(
        filter(None, lists), key=lambda pictures: isinstance(pictures[0].stored, str), default=[]
    )


def _pictures_in(name: str, value: object) -> Iterator[Picture]:
    if not isinstance(value, list | tuple):
        yield Picture(name, value)
        return
    for number, item in enumerate(value):
        if not _is_empty(item):
            yield Picture(f"{name}[{number}]", item)


def _stored_in_part(part: Mapping[str, object]) -> object:
    """Return the picture of a content part. Return None if a column of the row has the picture."""
    for key in _KEYS:
        value = part.get(key)
        if isinstance(value, Mapping):
            return _stored_in_part(value) or value
        if not _is_empty(value):
            return value
    return None


def _is_empty(value: object) -> bool:
    return value is None or value in ("", b"", [], {})
