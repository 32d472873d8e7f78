"""Find the tokens of answers: by marks of token ids, or by the parts of a text that are answers."""

from collections.abc import Iterable, Mapping, Sequence

from vexport.calibration.conversations import Conversation, RowError, Span
from vexport.records.values import json_type
from vexport.words import clip

# Columns with a value for each token, in data for training. A token is part of an answer if it is 1
# in every mask of the row, and not IGNORED in its labels. Sources: `use_loss_mask` of
# llm-compressor, `assistant_masks` of transformers' apply_chat_template, `completion_mask` of TRL,
# and the labels of transformers' losses.
LOSS_MASK, LABELS = "loss_mask", "labels"
MARKS = (LOSS_MASK, "assistant_masks", "completion_mask", LABELS)
IGNORED = -100
# Maximum number of characters of a wrong value in a message.
_SHOWN = 40
# Key of a turn in OpenAI's data for fine-tuning. It is 0 for an answer that is not learned.
WEIGHT = "weight"


def marked_tokens(marks: Mapping[str, object], tokens: int) -> tuple[bool, ...]:
    """Return True for each of a row's tokens that is part of an answer.

    `marks` are the row's columns of MARKS. Without marks, no token is part of an answer. Raises
    RowError for marks that do not fit the tokens.
    """
    columns = [_column(name, value, tokens, "input_ids") for name, value in marks.items()]
    return tuple(map(all, zip(*columns, strict=True))) if columns else (False,) * tokens


def answer_spans(conversation: Conversation, marked: Sequence[Span]) -> Sequence[Span]:
    """Return the marked spans of a rendered conversation, without turns that do not count.

    `marked` has the spans that the chat template marks. A turn does not count if its `weight` is 0,
    or the `loss_mask` of the row, which then has a value for each turn. Raises RowError for values
    that cannot be matched with the turns or with the spans.
    """
    turns = conversation.messages
    values: Sequence[object] = [turn.get(WEIGHT, 1) for turn in turns]
    is_other = [turn["role"] != "assistant" for turn in turns]
    if conversation.loss_mask is not None:
        values = _column(LOSS_MASK, conversation.loss_mask, len(turns), "turns")
        if any(value and other for value, other in zip(values, is_other, strict=True)):
            raise RowError(f"{LOSS_MASK} with 1 for a turn that is not the assistant's")
    counts = [
        _is_one(WEIGHT, value) for value, other in zip(values, is_other, strict=True) if not other
    ]
    if all(counts):
        return marked
    if len(counts) != len(marked):
        raise RowError(
            f"{len(counts)} turns of the assistant with weights, of which the chat template marks "
            f"{len(marked)}"
        )
    return [span for span, is_counted in zip(marked, counts, strict=True) if is_counted]


def _column(name: str, value: object, number: int, things: str) -> list[bool]:
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} with {json_type(value)} instead of a list")
    if len(value) != number:
        raise RowError(f"{name} with {len(value):,} values for {number:,} {things}")
    if name == LABELS:
        return [_is_label(each) for each in value]
    return [_is_one(name, each) for each in value]


def _is_label(value: object) -> bool:
    if type(value) is not int or (value < 0 and value != IGNORED):
        shown = clip(repr(value), _SHOWN)
        raise RowError(f"{LABELS} with the value {shown} instead of a token id or {IGNORED}")
    return value != IGNORED


def _is_one(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise RowError(f"{name} with the value {clip(repr(value), _SHOWN)} instead of 0 or 1")
    return bool(value)


def in_spans(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Return True for each token that has a character in a span.

    `offsets` are the characters of the tokens. Special tokens that the tokenizer adds have none.
    """
    return [any(start < last and first < end for first, last in spans) for start, end in offsets]
