"""Convert rows of text, conversations or token ids to calibration samples of token ids."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache, cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vexport import foreign
from vexport.calibration.answers import MARKS, answer_spans, in_spans, marked_tokens
from vexport.calibration.conversations import (
    ARGUMENTS,
    CALLS,
    PICTURE_MARK,
    RESULTS,
    TOOLS,
    ChatTokenizer,
    Conversation,
    RowError,
    Span,
    marked_spans,
    marks_answers,
    render_conversation,
    unrendered_parts,
)
from vexport.calibration.file_rows import RawRow, content_of
from vexport.calibration.folders import notes_on_folder
from vexport.calibration.picture_rows import row_with_pictures
from vexport.calibration.pictures import PictureProcessor, PictureSample, read_picture
from vexport.calibration.rows import SEPARATOR, Row, as_text, parse_row, refuse_media
from vexport.calibration.sources import raw_rows
from vexport.calibration.splits import TEXT, data_suffix
from vexport.checkpoint.chat_template import DEFAULT as DEFAULT_TEMPLATE
from vexport.checkpoint.chat_template import FILE as TEMPLATE_FILE
from vexport.checkpoint.chat_template import chat_templates
from vexport.checkpoint.source import DEFAULT, parse_data
from vexport.errors import InputError, first_line, raise_all
from vexport.files import digest_bytes, read_json_object
from vexport.records import CalibrationData
from vexport.records.values import join_limited
from vexport.rules import calibration as rules
from vexport.words import plural

# Maximum number of characters to tokenize per needed token. Long texts are cut before tokenizing,
# because samples contain only their first tokens.
CHARACTERS_PER_TOKEN = 64
# Assumed maximum number of tokens that a chat template and the tokenizer add to a string of a row.
TEMPLATE_TOKENS = 32
# Reading ends after MAX_BROKEN_ROWS broken rows, or if the first MAX_MULTIMODAL_ROWS rows all have
# images, video or sound, or no answer.
MAX_BROKEN_ROWS, MAX_MULTIMODAL_ROWS = 10, 10_000
# Reading also ends if the first MAX_LONG_ROWS rows all have pictures that do not fit in a sample.
MAX_LONG_ROWS = 100
# Maximum number of columns that a note names.
MAX_NAMED_COLUMNS = 4
# Number of rows that are searched for conversations.
FIRST_ROWS = 10
# The template that transformers uses for conversations with tools if the tokenizer has several.
TOOL_TEMPLATE = "tool_use"
# _MEDIA_ID matches keys of config.json whose values are the ids of tokens for images, video or
# sound. _MEDIA_TOKEN matches the text of such tokens.
_MEDIA_ID = re.compile(r"(image|img|video|vision|audio|speech|media|boi|eoi|boa|eoa)\w*_(id|index)")
_MEDIA_TOKEN = re.compile(
    r"[<\[].*(image|img|video|vision|audio|speech|media_|pixel).*[>\]]", re.IGNORECASE
)

# Notes on the parts of conversations that are not rendered.
_UNRENDERED = (
    "the chat template does not render the {part} of {rows}; the calibration text is without the "
    "{part}"
)
_NOTES: Mapping[str, str] = {
    **dict.fromkeys((CALLS, TOOLS, RESULTS), _UNRENDERED),
    ARGUMENTS: "{rows} with tool_calls whose arguments are not a JSON object; rendered without "
    "arguments, as in vLLM",
}
# Faults that all their rows share in a message, and rules of rows that are skipped with a note.
_SHARED = (rules.JSON_ROW, rules.NO_TEXT, rules.REMOTE_PICTURE, rules.PICTURE_TOKENS)
_SKIPPED = (rules.NO_TEXT, rules.PICTURE_TOKENS)
T = TypeVar("T")
# The id of a token, and whether statistics count it.
Token = tuple[int, bool]


class Tokenizer(ChatTokenizer, Protocol):
    """Methods and attributes of a transformers tokenizer that calibration uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: Sequence[int]
    chat_template: object
    is_fast: bool

    def __len__(self) -> int: ...

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool
    ) -> Mapping[str, Sequence[Any]]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Token ids of each sample, and the number (from 1) of the row in which it begins.

    `counted` is True for each token that statistics count, and empty if they count all tokens.
    `data` is the name of the data set. For samples of several data sets, `origins` has the name of
    the data set of each sample. If any sample has pictures, `pictures` has an entry for each
    sample, and `files` maps the pictures beside the data to their SHA-256. `notes` are sentences
    about skipped rows and about parts of conversations that the chat template does not render.
    """

    token_ids: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    counted: tuple[tuple[bool, ...], ...] = ()
    data: str = ""
    origins: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[PictureSample | None, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the token ids, and of the model's inputs for pictures."""
        content = json.dumps(self.token_ids)
        if self.pictures:
            content += json.dumps([sample and sample.digest for sample in self.pictures])
        return digest_bytes(content.encode())

    @property
    def picture_values(self) -> int:
        """Return the number of values of all pictures, as a tower reads them."""
        return sum(sample.values for sample in self.pictures if sample is not None)

    def pictures_of(self, position: int) -> PictureSample | None:
        """Return the pictures of a sample, or None for a sample of text."""
        return self.pictures[position] if self.pictures else None

    @property
    def counted_digest(self) -> str:
        """Return the SHA-256 of `counted`, or an empty string if statistics count all tokens."""
        return digest_bytes(json.dumps(self.counted).encode()) if self.counted else ""

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all samples."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def counted_tokens(self) -> int:
        """Return the number of tokens that statistics count."""
        return sum(map(sum, self.counted)) if self.counted else self.tokens

    @property
    def places(self) -> tuple[str, ...]:
        """Return the row of each sample for messages: `3`, or `3 of a.jsonl` for several files."""
        if not self.origins:
            return tuple(map(str, self.rows))
        pairs = zip(self.rows, self.origins, strict=True)
        return tuple(f"{row} of {origin}" for row, origin in pairs)

    def select(self, positions: Iterable[int]) -> "Samples":
        """Select the samples at these positions, in the order of `positions`."""
        positions = tuple(positions)
        return replace(
            self,
            token_ids=tuple(self.token_ids[position] for position in positions),
            rows=tuple(self.rows[position] for position in positions),
            counted=tuple(self.counted[position] for position in positions if self.counted),
            origins=tuple(self.origins[position] for position in positions if self.origins),
            pictures=tuple(self.pictures[position] for position in positions if self.pictures),
        )

    def evenly_spaced(self, number: int) -> "Samples":
        """Select at most `number` samples, evenly spaced."""
        return self.select(
            list(dict.fromkeys(position * len(self.rows) // number for position in range(number)))
        )


def read_samples(
    data: CalibrationData | Sequence[CalibrationData],
    checkpoint: Path,
    *,
    vocab_size: int,
    trust_remote_code: bool = False,
    with_pictures: bool = False,
) -> Samples:
    """Read at most `data.samples` samples of at most `data.seq_len` tokens.

    Conversations go through the chat template as in
    vLLM's chat endpoint. Rows with images, video or sound are skipped, with a note. If
    `with_pictures` is set, the checkpoint's processor prepares rows with images. With
    `answers_only`, statistics count only tokens of answers, and samples without any are skipped.
    The samples of several data sets are mixed evenly. Raises InputErrors for broken rows, and
    EnvironmentFault if the hub cannot be reached or a package is missing.
    """
    sources = (data,) if isinstance(data, CalibrationData) else tuple(data)
    load = partial(load_tokenizer, checkpoint, trust_remote_code=trust_remote_code)
    prepare = partial(PictureProcessor, checkpoint, trust_remote_code=trust_remote_code)
    tokenizer, processor = cache(load), cache(prepare) if with_pictures else None
    readers = [_Reader(each, checkpoint, vocab_size, tokenizer, processor) for each in sources]
    samples = [reader.samples() for reader in readers]
    raise_all([error for reader in readers for error in reader.errors()])
    raise_all([reader.no_rows_error() for reader in readers if not reader.number_read])
    mixed = _mixed(samples)
    shortages = [
        f"{each.name}: {plural(len(part.rows), 'sample')} instead of {each.samples:,}, because it "
        "has no more rows"
        for each, part in zip(sources, samples, strict=True)
        if len(sources) > 1 and len(part.rows) < each.samples
    ]
    return replace(mixed, notes=(*mixed.notes, *shortages))


def _mixed(parts: Sequence[Samples]) -> Samples:
    """Return the samples of several data sets in one order, so that each is spread evenly."""
    if len(parts) == 1:
        return parts[0]
    whole = Samples(
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        rows=tuple(chain.from_iterable(part.rows for part in parts)),
        counted=tuple(chain.from_iterable(part.counted for part in parts)),
        data=", ".join(f"{part.data} ({plural(len(part.rows), 'sample')})" for part in parts),
        origins=tuple(part.data for part in parts for _ in part.rows),
        notes=tuple(chain.from_iterable(part.notes for part in parts)),
        files=dict(chain.from_iterable(part.files.items() for part in parts)),
        pictures=tuple(part.pictures_of(place) for part in parts for place in range(len(part.rows)))
        if any(part.pictures for part in parts)
        else (),
    )
    shares = [
        ((place + 0.5) / len(part.rows), number)
        for number, part in enumerate(parts)
        for place in range(len(part.rows))
    ]
    return whole.select(sorted(range(len(shares)), key=shares.__getitem__))


def require_rows(data: CalibrationData) -> None:
    """Check the rows of a local file or folder, before slow packages are imported.

    All rows are checked that `read_samples` would read, as far as that is possible without the
    tokenizer. Raises InputError if the path is missing, if it is not a file with text, if rows are
    broken, or if there are no rows. `read_samples` reports all other problems.
    """
    if parse_data(data.name).kind != "path":
        return
    reader = _RowReader(data, reads_pictures=True)
    needed = data.samples * data.seq_len if reader.packs else data.samples
    for row in reader.read():
        needed -= _most_tokens(row) if reader.packs and not row.pictures else 1
        if needed <= 0:
            break
    # A model that takes no pictures skips rows with broken pictures.
    others = (rules.PICTURE.id, rules.PLACEHOLDERS.id)
    errors = [error for error in reader.errors() if error.rule not in others]
    raise_all(errors if reader.number else [_no_rows_error(data.name)])


def _most_tokens(row: Row) -> int:
    """Return the maximum number of tokens of a row, without a tokenizer."""
    of_texts = sum(len(text.encode()) + TEMPLATE_TOKENS for text in row.texts())
    return of_texts if row.ids is None else len(row.ids)


def has_conversations(data: CalibrationData) -> bool:
    """Return True if a file or folder has conversations that need a chat template.

    Only the first rows are read. Returns False for a dataset on the hub, because it is not read
    here.
    """
    if parse_data(data.name).kind != "path" or not data.chat_template:
        return False
    rows = islice(_RowReader(data).read(), FIRST_ROWS)
    return any(row.conversation is not None and row.text is None for row in rows)


def require_chat_template(root: Path, data: CalibrationData, *, name: str) -> None:
    """Raise InputError if the model in `root` has no chat template for the conversations of `data`.

    If only answers count, the template must mark them. `name` is the model as the user wrote it.
    """
    templates = chat_templates(root)
    if not templates:
        raise _no_chat_template_error(name, data.name)
    if data.answers_only and not any(map(marks_answers, templates.values())):
        raise _no_marks_error(name, data.name)


def _no_chat_template_error(model: str, text: str) -> InputError:
    return InputError.of(rules.CHAT_TEMPLATE, model, text=text, file=TEMPLATE_FILE)


def _no_marks_error(model: str, text: str) -> InputError:
    return InputError.of(rules.ANSWER_MARKS, model, text=text, file=TEMPLATE_FILE)


def _no_rows_error(name: str) -> InputError:
    parsed = parse_data(name)
    is_empty = parsed.kind == "path" and parsed.path.is_file() and not parsed.path.stat().st_size
    return InputError.of(rules.NO_ROWS, name, found="an empty file" if is_empty else "no rows")


def first_texts(data: CalibrationData, limit: int) -> list[str]:
    """Return the beginnings of at most `limit` rows of plain text, without a tokenizer.

    Each text is cut to CHARACTERS_PER_TOKEN characters for each token of a sample. Conversations
    and rows of token ids are skipped.
    """
    rows = (row for row in _RowReader(data).read() if row.conversation is None)
    texts = (row.text for row in rows if row.text is not None)
    return [text[: CHARACTERS_PER_TOKEN * data.seq_len] for text in islice(texts, limit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Tokens of a row.

    If rows are packed, a sample may start in the middle of this row. The tokens `start` are then
    put in front of the sample. A row with pictures is never packed.
    """

    number: int
    tokens: Sequence[Token]
    start: Sequence[Token] = ()
    pictures: PictureSample | None = None


class _RowReader:
    """Reads the rows of a data set, and collects the errors of rows that cannot be used."""

    def __init__(self, data: CalibrationData, *, reads_pictures: bool = False) -> None:
        self.number = 0
        self._data = data
        self._reads_pictures = reads_pictures
        # Places and reasons of rows with the same fault.
        self._faults = defaultdict[tuple[str, str], list[tuple[str, RowError]]](list)
        rows = raw_rows(data)
        first = list(islice(rows, 1))
        self._raw = chain(first, rows)
        file = first[0].file if first else None
        is_prose = file is not None and data_suffix(file) in TEXT
        self.packs = is_prose if data.pack is None else data.pack

    def read(self) -> Iterator[Row]:
        """Yield each valid row, until there are too many other rows."""
        return self.converted(lambda _, row: row)

    def converted(self, convert: Callable[[RawRow, Row], T]) -> Iterator[T]:
        """Yield the result of `convert` for each valid row. `convert` may raise RowError."""
        broken = 0
        for number, raw in enumerate(self._raw, start=1):
            self.number = number
            try:
                yield convert(raw, self._parsed(raw))
                continue
            except RowError as problem:
                error = problem
            except RecursionError:
                error = RowError("JSON nested too deeply")
            # All rows with invalid JSON share an error, and all rows with images a note.
            kind = (error.rule.id, "" if error.rule in _SHARED else error.reason)
            self._faults[kind].append((raw.place, error))
            broken += error.rule not in _SKIPPED
            only_media = not broken and self.number == len(self.multimodal)
            only_long = not broken and self.number == len(self.long)
            if (
                broken == MAX_BROKEN_ROWS
                or (only_media and self.number == MAX_MULTIMODAL_ROWS)
                or (only_long and self.number == MAX_LONG_ROWS)
            ):
                return

    def _parsed(self, raw: RawRow) -> Row:
        content, column = content_of(raw), self._data.column
        row = parse_row(content, column)
        if row.ids is not None and self._data.answers_only:
            marked_tokens(row.marks, len(row.ids) + len(row.hidden))
        if self._reads_pictures and (with_pictures := row_with_pictures(content, row, column)):
            return with_pictures
        refuse_media(content, row, column)
        return row

    @property
    def multimodal(self) -> Sequence[tuple[str, RowError]]:
        """Return the places and errors of skipped rows with an image, a video or sound."""
        return self._faults.get((rules.NO_TEXT.id, ""), ())

    @property
    def long(self) -> Sequence[tuple[str, RowError]]:
        """Return the places and errors of rows with pictures that do not fit in a sample."""
        return self._faults.get((rules.PICTURE_TOKENS.id, ""), ())

    def errors(self) -> list[InputError]:
        """Return an error for each fault, with the first row that has the fault."""
        return [
            InputError.of(rows[0][1].rule, _row_places(rows), reason=rows[0][1].reason)
            for rows in self._faults.values()
            if rows[0][1].rule not in _SKIPPED
        ]


class _Reader(_RowReader):
    """Tokenizes the rows of a data set, and collects notes on skipped rows and unrendered parts."""

    def __init__(
        self,
        data: CalibrationData,
        checkpoint: Path,
        vocab_size: int,
        tokenizer: Callable[[], Tokenizer],
        processor: Callable[[], PictureProcessor] | None,
    ) -> None:
        super().__init__(data, reads_pictures=processor is not None)
        self._load_processor = processor
        self._vocab_size = vocab_size
        self._checkpoint = checkpoint
        self._load_tokenizer = tokenizer
        self.number_read = 0
        self._files: dict[str, str] = {}
        self._omitted = Counter[str]()
        self._unused = Counter[str]()
        # The number of samples that were skipped because no token counts.
        self._number_without_answer = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the checkpoint. It is loaded when the first row needs it."""
        return self._load_tokenizer()

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        """Return the chat templates by name, in the order in which vLLM looks for them."""
        own = self.tokenizer.chat_template
        named = own if isinstance(own, Mapping) else {DEFAULT_TEMPLATE: own} if own else {}
        return {**named, **chat_templates(self._checkpoint)}

    @cached_property
    def _start(self) -> Sequence[int]:
        """Return the special tokens that the tokenizer puts before a text: usually BOS or none."""
        plain = self._encode("a", add_special_tokens=False)
        whole = self._encode("a", add_special_tokens=True)
        places = range(len(whole) - len(plain) + 1)
        at = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
        return whole[:at]

    @cached_property
    def _media_ids(self) -> frozenset[int]:
        """Return the image, video and sound tokens, found by the config and by their names."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = {number for number, token in added.items() if _MEDIA_TOKEN.fullmatch(str(token))}
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        others = [getattr(self.tokenizer, name, None) for name in names]
        return self._media_ids_of_config.union(ids).difference(others)

    @cached_property
    def _media_words(self) -> Sequence[str]:
        known = [number for number in self._media_ids if number < len(self.tokenizer)]
        words = map(self.tokenizer.convert_ids_to_tokens, known)
        return [word for word in words if word and len(word) > 2]

    def samples(self) -> Samples:
        """Read the samples of the data set, as far as its rows are not broken."""
        data = self._data
        rows = self.converted(self._tokenized)
        whole = _packed(rows, data) if self.packs else rows
        cut = (replace(row, tokens=row.tokens[: data.seq_len]) for row in whole)
        samples = list(islice(self._with_answer(cut), data.samples))
        self.number_read = len(samples)
        counted = [tuple(is_counted for _, is_counted in row.tokens) for row in samples]
        read = Samples(
            token_ids=tuple(tuple(token for token, _ in row.tokens) for row in samples),
            rows=tuple(row.number for row in samples),
            counted=tuple(counted) if data.answers_only else (),
            data=f"the answers in {data.name}" if data.answers_only else data.name,
            pictures=tuple(row.pictures for row in samples)
            if any(row.pictures for row in samples)
            else (),
            files=self._files,
        )
        return replace(read, notes=(*self.notes(), *self._notes_on_answers(read)))

    def _with_answer(self, samples: Iterable[_Tokens]) -> Iterator[_Tokens]:
        """Yield the samples that have a counted token, until there are too many others."""
        has_answers = False
        for sample in samples:
            if any(is_counted for _, is_counted in sample.tokens):
                has_answers = True
                yield sample
                continue
            self._number_without_answer += 1
            if not has_answers and self._number_without_answer == MAX_MULTIMODAL_ROWS:
                return

    def no_rows_error(self) -> InputError:
        """Return the error for data without any row that calibration can use."""
        if self._number_without_answer:
            number = self._number_without_answer
            return InputError.of(rules.NO_ANSWERS, self._data.name, count=number)
        if self.long:
            place, needed = self.long[0]
            return InputError.of(
                rules.PICTURE_TOKENS, self._data.name, reason=needed.reason, place=place
            )
        if not self.multimodal:
            return _no_rows_error(self._data.name)
        (place, what), number = self.multimodal[0], len(self.multimodal)
        each = "the only row has" if number == 1 else f"each of the {number:,} rows read has"
        return InputError.of(
            rules.NO_TEXT, self._data.name, each=each, what=what.reason, place=place
        )

    def notes(self) -> Iterator[str]:
        """Yield sentences about skipped rows and about parts that the chat template
        does not render.
        """
        name = self._data.name
        yield from notes_on_folder(self._data)
        if self.multimodal:
            (place, what), number = self.multimodal[0], len(self.multimodal)
            used = "text and pictures" if self._reads_pictures else "only text"
            yield (
                f"{name}: skipped {number:,} of {plural(self.number, 'row')} with images, video or "
                f"sound (first: {what.reason!r}, {place}), because calibration uses {used}"
            )
        if self.long:
            place, needed = self.long[0]
            yield (
                f"{name}: skipped {len(self.long):,} of {plural(self.number, 'row')} whose "
                f"pictures do not fit in a sample of {self._data.seq_len:,} tokens (first: "
                f"{needed.reason}, {place})"
            )
        for part, note in _NOTES.items():
            if self._omitted[part]:
                yield f"{name}: {note.format(rows=plural(self._omitted[part], 'row'), part=part)}"
        if self._unused:
            columns = join_limited(list(self._unused), " and ", MAX_NAMED_COLUMNS)
            rows = plural(max(self._unused.values()), "row")
            alike = ": all tokens count alike, except for those that attention_mask hides"
            yield f"{name}: {columns} of {rows} not used{'' if self._data.answers_only else alike}"

    def _notes_on_answers(self, read: Samples) -> Iterator[str]:
        data = self._data
        if not data.answers_only:
            return
        yield (
            f"{data.name}: {read.counted_tokens:,} of {plural(read.tokens, 'token')} are answers; "
            "the other tokens run, and do not count"
        )
        if number := self._number_without_answer:
            yield (
                f"{data.name}: skipped {plural(number, 'sample')} without an answer in "
                f"{plural(data.seq_len, 'token')}"
            )

    def _tokenized(self, raw: RawRow, row: Row) -> _Tokens:
        used = MARKS if self._data.answers_only else ()
        self._unused.update(name for name in row.unused if name not in used)
        if row.pictures:
            return self._with_pictures(raw, row)
        uses_text = not self._data.chat_template or self._data.name == DEFAULT
        if uses_text and row.conversation is not None and row.text is None:
            row = as_text(row, row.conversation)
        max_tokens = self._data.seq_len * (self._data.samples if self.packs else 1)
        begins = not (self.packs and raw.continues_previous)
        tokens, start = self._tokens(row, max_tokens, begins=begins)
        ids = [token for token, _ in tokens]
        self._require_valid(ids)
        end = self.tokenizer.eos_token_id if self.packs and row.ids is None else None
        if end is not None and not raw.continues_previous and ids[-1] != end:
            tokens = [*tokens, (end, tokens[-1][1])]
        starts = [(token, not self._data.answers_only) for token in start]
        return _Tokens(number=raw.number, tokens=tokens, start=starts)

    def _require_valid(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RowError("a row without tokens")
        smallest, largest = min(ids), max(ids)
        if smallest < 0 or largest >= self._vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise RowError(f"token id {wrong} outside the vocabulary of {self._vocab_size}")

    def _with_pictures(self, raw: RawRow, row: Row) -> _Tokens:
        """Return the tokens of a row with pictures, with all tokens that stand for pictures.

        Raises RowError if a picture cannot be used, or if the tokens of the pictures exceed the
        length of a sample.
        """
        assert self._load_processor is not None
        root = parse_data(self._data.name).path
        root = root if root.is_dir() else root.parent
        folder = None if raw.file is None else raw.file.parent
        pictures = [
            read_picture(picture, folder, folder and root, self._files) for picture in row.pictures
        ]
        text, is_rendered = self._text_with_marks(row)
        ids, sample = self._load_processor().ids(
            text, pictures, row.pictures, is_rendered=is_rendered
        )
        self._require_valid(ids)
        needed = 1 + max(place for place, token in enumerate(ids) if token in self._media_ids)
        if needed > self._data.seq_len:
            raise RowError(f"{needed:,} tokens", rules.PICTURE_TOKENS)
        tokens = self._with_answers(row, text, ids)[: self._data.seq_len]
        return _Tokens(
            number=raw.number, tokens=tokens, pictures=replace(sample, tokens=len(tokens))
        )

    def _with_answers(self, row: Row, text: str, ids: Sequence[int]) -> Sequence[Token]:
        """Return the tokens of a text with pictures, of which the processor returned `ids`.

        Answers are found in the tokens of the text. The processor puts several tokens in the place
        of a picture. Without a chat template, no token is an answer.
        """
        if not self._data.answers_only:
            return [(token, True) for token in ids]
        conversation = row.conversation if self._data.chat_template else None
        template = self._template(conversation) if conversation else None
        if conversation is None or template is None:
            return [(token, False) for token in ids]
        spans = self._spans(conversation, template)
        tokens = self._encode_answers(text, spans, add_special_tokens=False)
        counted = [False] * len(ids)
        matcher = SequenceMatcher(None, [token for token, _ in tokens], ids, autojunk=False)
        for start, place, length in matcher.get_matching_blocks():
            counted[place : place + length] = [
                is_counted for _, is_counted in tokens[start : start + length]
            ]
        return list(zip(ids, counted, strict=True))

    def _text_with_marks(self, row: Row) -> tuple[str, bool]:
        """Return the text of a row with marks for its pictures, and True if a template made it."""
        conversation = row.conversation
        template = None
        if conversation is not None and self._data.chat_template:
            template = self._template(conversation)
        if conversation is not None and template is not None:
            return self._rendered(conversation, template), True
        text = row.text
        if text is None and not self._data.chat_template and conversation is not None:
            marks = PICTURE_MARK * len(row.pictures)
            text = f"{marks}{SEPARATOR}{as_text(row, conversation).text}"
        if text is None:
            raise _no_chat_template_error(str(self._checkpoint), self._data.name)
        return text, False

    def _tokens(
        self, row: Row, max_tokens: int, *, begins: bool
    ) -> tuple[Sequence[Token], Sequence[int]]:
        """Return a row's tokens, and the start tokens for samples that begin inside the row.

        Only the beginning of the text, enough for `max_tokens` tokens, is tokenized. `begins` is
        False if the row continues the previous row. Raises InputError if the row needs a chat
        template and the model has none. Raises ValueError if the row cannot be rendered or
        tokenized, and MultimodalRowError if it has tokens that stand for an image, a video or
        sound.
        """
        if row.ids is not None:
            _refuse_ids(row.ids, self._media_ids_of_config)
            return self._marked(row, row.ids), ()
        words = self._media_words
        if found := next((word for text in row.texts() for word in words if word in text), None):
            raise RowError(found, rules.NO_TEXT)
        most = CHARACTERS_PER_TOKEN * max_tokens
        conversation = row.conversation if self._data.chat_template else None
        template = self._template(conversation) if conversation else None
        if conversation is not None and template is not None:
            text = self._rendered(conversation, template)
            spans = self._spans(conversation, template)
            tokens = self._encode_answers(text[:most], spans, add_special_tokens=False)
            bos = self.tokenizer.bos_token_id
            return tokens, (bos,) if bos is not None and tokens[0][:1] == (bos,) else ()
        if row.text is None:
            raise _no_chat_template_error(str(self._checkpoint), self._data.name)
        tokens = self._encode_answers(row.text[:most], row.answers, add_special_tokens=begins)
        ids = [token for token, _ in tokens]
        start = self._start
        if begins and start and ids[: 2 * len(start)] == [*start, *start]:
            tokens = tokens[len(start) :]  # the text itself begins with BOS
        _refuse_ids(ids, self._media_ids)
        return tokens, start

    def _marked(self, row: Row, ids: Sequence[int]) -> Sequence[Token]:
        """Return the tokens of a row of token ids."""
        if not self._data.answers_only:
            return [(token, True) for token in ids]
        marked = marked_tokens(row.marks, len(ids) + len(row.hidden))
        visible = (each for place, each in enumerate(marked) if place not in row.hidden)
        return list(zip(ids, visible, strict=True))

    @cached_property
    def _media_ids_of_config(self) -> frozenset[int]:
        """Return the ids of image, video and sound tokens in config.json.

        Rows of token ids are compared with these ids, so that they need no tokenizer.
        """
        config = self._checkpoint / "config.json"
        return frozenset(_media_ids(read_json_object(config))) if config.is_file() else frozenset()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if foreign.text(text) != text:
            raise RowError("a text with half of a surrogate pair, which is no character")
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            raise RowError(f"a text that the tokenizer refuses ({first_line(error)})") from None

    def _encode_answers(
        self, text: str, answers: Sequence[Span], *, add_special_tokens: bool
    ) -> Sequence[Token]:
        """Return the tokens of a text. If only answers count, `answers` are their characters."""
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        if not self._data.answers_only:
            return [(token, True) for token in ids]
        if not self.tokenizer.is_fast:
            raise InputError.of(rules.TOKEN_OFFSETS, str(self._checkpoint))
        encoded = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        return list(zip(ids, in_spans(encoded["offset_mapping"], answers), strict=True))

    def _template(self, conversation: Conversation) -> str | None:
        """Return the chat template for a conversation, as vLLM and transformers choose it."""
        if conversation.tools and TOOL_TEMPLATE in self._templates:
            return self._templates[TOOL_TEMPLATE]
        return self._templates.get(DEFAULT_TEMPLATE)

    def _spans(self, conversation: Conversation, template: str) -> Sequence[Span]:
        """Return the answers in the text of a conversation, or nothing if all tokens count."""
        if not self._data.answers_only:
            return ()
        if not marks_answers(template):
            raise _no_marks_error(str(self._checkpoint), self._data.name)
        return answer_spans(conversation, marked_spans(self.tokenizer, template, conversation))

    def _rendered(self, conversation: Conversation, template: str) -> str:
        render = partial(render_conversation, self.tokenizer, template)
        text = render(conversation)
        self._omitted.update(unrendered_parts(conversation, text, render))
        return text


def _refuse_ids(ids: Sequence[int], media: frozenset[int]) -> None:
    if found := media.intersection(ids):
        raise RowError(f"token id {min(found)}", rules.NO_TEXT)


def _row_places(rows: Sequence[tuple[str, RowError]]) -> str:
    place, others = rows[0][0], len(rows) - 1
    return place + (f" and {others} more row{'s' if others > 1 else ''}" if others else "")


def _media_ids(config: Mapping[str, object]) -> Iterator[int]:
    """Yield the token ids in a config, and in its nested configs, that stand for an image, a
    video or sound.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _media_ids(value)
        elif _MEDIA_ID.fullmatch(key):
            values = value if isinstance(value, list) else [value]
            yield from (each for each in values if type(each) is int and each >= 0)


def _packed(rows: Iterable[_Tokens], data: CalibrationData) -> Iterator[_Tokens]:
    """Concatenate the rows and cut them into samples of `seq_len` tokens.

    The last sample contains the remaining tokens. Every sample starts like a served prompt: with
    BOS, if the tokenizer adds BOS. A row with pictures is a sample of its own.
    """
    pending, number = list[Token](), 0
    for row in rows:
        if row.pictures is not None:
            yield row
            continue
        start = list(row.start) if len(row.start) < data.seq_len else []
        if not pending:
            number = row.number
            pending = _with_start(list(row.tokens), start)
        else:
            pending.extend(row.tokens)
        while len(pending) >= data.seq_len:
            yield _Tokens(number=number, tokens=pending[: data.seq_len])
            rest, number = pending[data.seq_len :], row.number
            pending = _with_start(rest, start) if rest else []
    if pending:
        yield _Tokens(number=number, tokens=pending)


def _with_start(tokens: list[Token], start: list[Token]) -> list[Token]:
    """Return the tokens with `start` in front, unless they already begin with `start`."""
    return tokens if tokens[: len(start)] == start else [*start, *tokens]


def load_tokenizer(checkpoint: Path, *, trust_remote_code: bool) -> Tokenizer:
    """Return the checkpoint's tokenizer.

    Raises InputError if transformers cannot load a tokenizer from the checkpoint.
    """
    import transformers

    load = transformers.AutoTokenizer.from_pretrained
    try:
        tokenizer: Tokenizer = load(checkpoint, trust_remote_code=trust_remote_code)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError.of(rules.TOKENIZER_CODE, str(checkpoint)) from None
        reason = first_line(error)
        raise InputError.of(rules.TOKENIZER, str(checkpoint), reason=reason) from None
    return tokenizer
