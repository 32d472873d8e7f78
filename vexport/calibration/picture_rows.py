"""Find the pictures of a row, and the places of the pictures in its text.

A picture is in a content part (`image_url` and similar types), in a column such as `images`, or
under such a key of a turn. Pictures of a column belong to the placeholders of the text, such as
`<image>`, in their order. A placeholder with a number, such as `<image 2>`, names its picture.
Without placeholders the pictures are in front of the first user turn.
"""

import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from vexport.calibration.conversations import (
    PICTURE,
    PICTURE_MARK,
    Message,
    RowError,
    media_of_part,
)
from vexport.calibration.rows import (
    Row,
    is_empty,
    is_stored_file,
    media_columns,
    number_of_column,
    placeholders,
    tags,
)
from vexport.rules import calibration as rules
from vexport.words import plural

# Matches columns, keys and types of content parts for pictures. Video and sound are not read.
_OF_PICTURES = re.compile(r"(input_|output_)?(image|img|picture|photo)s?(_|-|\d|$)", re.IGNORECASE)
_OTHER_MEDIA = re.compile(r"video|audio|speech", re.IGNORECASE)
# Columns that differ only in how a picture is stored hold the same picture.
_STORAGE = re.compile(r"s?(_(url|path|file|bytes|base64|data)s?)?$", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)\W*$")
# Keys of a content part that hold the picture.
_KEYS = ("image_url", "image", "url", "path", "data", "source", "bytes", "base64")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a row as the data stores it, and its field, such as `images[1]`.

    `stored` is an address, a path, bytes, or an object with bytes and a path.
    """

    field: str
    stored: object


@dataclass(frozen=True, slots=True)
class _Place:
    """A place for a picture of a column: a content part without a picture, or a placeholder."""

    tag: str = ""

    @property
    def number(self) -> int | None:
        found = _NUMBER.search(self.tag)
        return None if found is None else int(found[1])


# A content part of a turn.
_Part = Picture | _Place | object


class _OtherMedia(Exception):
    """A row with video, sound or a file."""


def row_with_pictures(raw: object, row: Row, column: str | None) -> Row | None:
    """Return a row with its pictures, or None if it has none or has video, sound or a file.

    The pictures are in the order of the text. In the text, PICTURE_MARK is in the place of each
    picture, and in a conversation the part PICTURE.

    Raises RowError if the placeholders and the pictures of a column are not equally many, or if a
    placeholder has the number of no picture.
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
    text, pictures = _marked(row.text, kept)
    return replace(row, text=text, pictures=tuple(pictures))


def _placed(row: Row, kept: Sequence[Picture]) -> Row:
    assert row.conversation is not None
    messages = row.conversation.messages
    first = next((at for at, each in enumerate(messages) if each["role"] == "user"), 0)
    unfilled = [_parts_of_turn(each, f"messages[{number}]") for number, each in enumerate(messages)]
    turns = _filled(unfilled, kept, first)
    pictures = [part for parts in turns for part in parts if isinstance(part, Picture)]
    if not pictures:
        return row
    text = row.text and _text_of_pair(row.text, kept, pictures)
    shown = tuple(map(_shown, messages, turns))
    conversation = replace(row.conversation, messages=shown)
    return replace(row, conversation=conversation, text=text, pictures=tuple(pictures))


def _text_of_pair(text: str, kept: Sequence[Picture], pictures: Sequence[Picture]) -> str:
    """Return the text of a conversation with marks. Without all its turns, marks are in front."""
    with suppress(RowError):
        marked, found = _marked(text, kept)
        if found == pictures:
            return marked
    return _in_front(text, len(pictures))


def _shown(message: Message, parts: Sequence[_Part]) -> Message:
    """Return a message with the part PICTURE for each picture, without its keys of pictures."""
    own = {key for key, _ in media_columns(message)}
    kept = {key: message[key] for key in message if key not in own}
    content = [PICTURE if isinstance(part, Picture) else part for part in parts]
    return {**kept, "content": content}


def _parts_of_turn(message: Message, field: str) -> list[_Part]:
    """Return the content parts of a turn, with the pictures of parts and of the turn's keys."""
    content = message.get("content")
    parts = [
        _part(part, f"{field}.content[{number}]")
        for number, part in enumerate([content] if isinstance(content, str) else content or ())
    ]
    own = _pictures_of_columns(message, None, f"{field}.")
    return _filled([parts], own, 0)[0] if own else parts


def _part(part: object, field: str) -> _Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or (kind := media_of_part(part)) is None:
        return part
    if not _OF_PICTURES.match(kind):
        raise _OtherMedia
    stored = _stored_in_part(part)
    return _Place() if stored is None else Picture(field, stored)


def _filled(
    turns: Sequence[list[_Part]], kept: Sequence[Picture], first: int
) -> Sequence[list[_Part]]:
    """Put the pictures of a column at their places in the parts of turns.

    The places are parts without a picture. If these are not as many as the pictures, placeholders
    in the texts are places, too: at the usual positions, or else at any position. Without places,
    the pictures are in front of the turn `first`.
    """
    found = list[_Place]()
    for split in (_unsplit, _split_at_placeholders, _split_at_tags):
        if split is not _unsplit and not kept:
            break
        divided = [[piece for part in parts for piece in split(part)] for parts in turns]
        found = [part for parts in divided for part in parts if isinstance(part, _Place)]
        chosen = _chosen(found, kept, is_last=split is _split_at_tags)
        if chosen is not None:
            following = iter(chosen)
            return [
                [next(following) if isinstance(part, _Place) else part for part in parts]
                for parts in divided
            ]
    if not found:
        return [[*kept, *parts] if at == first else parts for at, parts in enumerate(turns)]
    raise _mismatch(found, kept)


def _chosen(
    places: Sequence[_Place], kept: Sequence[Picture], *, is_last: bool
) -> Sequence[Picture] | None:
    """Return the picture for each place, or None if the numbers of places and pictures differ.

    Placeholders with numbers are read when all placeholders are known.
    """
    numbers = [place.number for place in places]
    if places and None not in numbers:
        named = _by_number(kept, from_zero=0 in numbers)
        is_known = is_last and all(number in named for number in numbers)
        return [named[number] for number in numbers] if is_known else None
    return kept if places and len(places) == len(kept) else None


def _by_number(kept: Sequence[Picture], *, from_zero: bool) -> Mapping[int | None, Picture]:
    """Return the pictures by the numbers of their columns, otherwise by their places in a list."""
    numbers = [number_of_column(picture.field) for picture in kept]
    if None in numbers:
        numbers = list(range(0 if from_zero else 1, len(kept) + (0 if from_zero else 1)))
    return dict(zip(numbers, kept, strict=True))


def _mismatch(places: Sequence[_Place], kept: Sequence[Picture]) -> RowError:
    counts = f"{plural(len(places), 'placeholder')} for {plural(len(kept), 'picture')}"
    numbers = [place.number for place in places]
    if None not in numbers:
        named = _by_number(kept, from_zero=0 in numbers)
        wrong = next(place.tag for place in places if place.number not in named)
        counts += f" (no picture for {wrong})"
    return RowError(counts, rules.PLACEHOLDERS)


def _marked(text: str, kept: Sequence[Picture]) -> tuple[str, list[Picture]]:
    """Return a text with a mark for each picture, and its pictures in their order."""
    (parts,) = _filled([[{"type": "text", "text": text}]], kept, 0)
    pictures = [part for part in parts if isinstance(part, Picture)]
    if len(parts) == len(pictures) + 1 and parts[:-1] == [*kept] and _text(parts[-1]) == text:
        return _in_front(text, len(pictures)), pictures
    marked = (PICTURE_MARK if isinstance(part, Picture) else _text(part) for part in parts)
    return "".join(map(str, marked)), pictures


def _in_front(text: str, pictures: int) -> str:
    return "\n".join([PICTURE_MARK * pictures, text])


def _text(part: object) -> object:
    return part.get("text") if isinstance(part, Mapping) else None


def _unsplit(part: _Part) -> Iterator[_Part]:
    yield part


def _split_at_placeholders(part: _Part) -> Iterator[_Part]:
    """Split a text at the placeholders at the usual positions."""
    text = _text(part)
    usual = list(placeholders(text)) if isinstance(text, str) else []
    if any(_OTHER_MEDIA.search(str(text), *span) for span in usual):
        raise _OtherMedia
    runs = list[tuple[int, int]]()
    for begin, end in _runs(str(text)):
        inside = [(start, stop) for start, stop in usual if start < end and begin < stop]
        if inside:
            runs.append((min(begin, inside[0][0]), max(end, inside[-1][1])))
    return _split(part, runs)


def _split_at_tags(part: _Part) -> Iterator[_Part]:
    """Split a text at all placeholders, also in the middle of a sentence."""
    return _split(part, _runs(str(_text(part))))


def _runs(text: str) -> list[tuple[int, int]]:
    """Return the begins and ends of the placeholders of pictures.

    Adjacent tags with different names are a single placeholder, as in
    `<|vision_start|><|image_pad|><|vision_end|>`.
    """
    runs = list[tuple[int, int]]()
    names = set[str]()
    for begin, end in tags(text):
        if _OTHER_MEDIA.search(text, begin, end):
            continue
        name = re.sub(r"\d", "", text[begin:end])
        if runs and runs[-1][1] == begin and name not in names:
            runs[-1] = (runs[-1][0], end)
            names.add(name)
        else:
            runs.append((begin, end))
            names = {name}
    return runs


def _split(part: _Part, runs: Sequence[tuple[int, int]]) -> Iterator[_Part]:
    """Split a text part at placeholders.

    Line breaks around placeholders and empty texts are left out.
    """
    text = _text(part)
    if not isinstance(part, Mapping) or not isinstance(text, str) or not runs:
        yield part
        return
    start = 0
    for begin, end in runs:
        if piece := text[start:begin].strip("\n"):
            yield {**part, "text": piece}
        yield _Place(text[begin:end].strip())
        start = end
    if piece := text[start:].strip("\n"):
        yield {**part, "text": piece}


def _pictures_of_columns(
    raw: Mapping[object, object] | Message, column: str | None, parent: str = ""
) -> list[Picture]:
    """Return the pictures of a row's columns or of a turn's keys, in the order of the columns.

    If columns hold the same pictures, as `image` and `image_url`, a column with bytes is preferred.
    """
    found: dict[str, list[Picture]] = {}
    for name, value in media_columns(raw):
        if name == column:
            continue
        if not _holds_pictures(name, value):
            raise _OtherMedia
        pictures = list(_pictures_in(f"{parent}{name}", value))
        before = found.setdefault(_STORAGE.sub("", name), pictures)
        if isinstance(before[0].stored, str) and not isinstance(pictures[0].stored, str):
            found[_STORAGE.sub("", name)] = pictures
    return [picture for pictures in found.values() for picture in pictures]


def _holds_pictures(name: str, value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    if not is_stored_file(first):
        return _OF_PICTURES.match(name) is not None
    kind = mimetypes.guess_type(str(first.get("path")))[0]
    return _OTHER_MEDIA.search(name) is None and (kind is None or kind.startswith("image/"))


def _pictures_in(name: str, value: object) -> Iterator[Picture]:
    if not isinstance(value, list | tuple):
        yield Picture(name, value)
        return
    for number, item in enumerate(value):
        if not is_empty(item):
            yield Picture(f"{name}[{number}]", item)


def _stored_in_part(part: Mapping[str, object]) -> object:
    """Return the picture of a content part. Return None if a column of the row has the picture."""
    for key in _KEYS:
        value = part.get(key)
        if isinstance(value, Mapping):
            return _stored_in_part(value) or value
        if not is_empty(value):
            return value
    return None
