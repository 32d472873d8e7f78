"""How responses ended: cut before their end, empty, or without an answer.

A response is the text that the model generates for a document. The answer is the part that the
task's filter extracts from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["", "cut", "empty", "unparsed"]
"""The problem with a response, whatever its score."""
CUT_REASONS = frozenset(
    ("length", "max_tokens", "max_length", "model_length", "repetition", "content_filter")
)
COMPLETE_REASONS = frozenset(
    ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_str", "matched_stop")
)
"""Finish reasons of vLLM and other servers, for cut responses and for complete responses."""
NO_ANSWER_TEXTS = frozenset(("", "[invalid]", "invalid", "[invalidanswer]"))
"""Results of lm-eval's filters if they find no answer, in lower case."""
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# A response with fewer bytes than this number times the maximum number of tokens was not cut.
_BYTES_PER_TOKEN = 2
MAJORITY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a response ended.

    `is_cut` is True for every cut response. The `state` of a cut response is "cut", unless the
    answer is at the beginning of the response. `is_whole` is True if the response is certainly
    complete. `is_thinking` is True if the model did not end its thinking.
    """

    state: State
    is_cut: bool = False
    is_whole: bool = False
    is_thinking: bool = False


LETTERS = {
    ".": Ending(state=""),
    "a": Ending(state="", is_cut=True),
    "c": Ending(state="cut", is_cut=True),
    "t": Ending(state="cut", is_cut=True, is_thinking=True),
    "e": Ending(state="empty"),
    "u": Ending(state="unparsed", is_whole=True),
    "U": Ending(state="unparsed"),
}
"""All endings that `count_answers` distinguishes, by their letters in files.

- `a`: cut after the answer
- `t`: cut while the model was thinking
- `u`: complete, without an answer
- `U`: without an answer, and perhaps cut
"""


def letter_of(ending: Ending) -> str:
    """Return the letter of an ending."""
    is_whole = ending.is_whole and ending.state == "unparsed"
    return next(
        letter for letter, known in LETTERS.items() if known == replace(ending, is_whole=is_whole)
    )


def ending_of(
    *,
    prompt: str,
    responses: Sequence[str],
    filtered: Sequence[str],
    reasons: Sequence[str],
    longest: int,
    is_stripped: bool,
) -> Ending:
    """Return how the response to a document ended.

    `responses` are the raw texts, more than one if the task samples repeatedly, and `filtered` the
    answers in them. `reasons` are the finish reasons, empty if none was recorded. `longest` is the
    maximum number of tokens. `is_stripped` is True if finished thinking was removed from the
    responses (think_end_token).
    """
    is_thinking = _is_majority(
        _is_unfinished(prompt, text, is_stripped=is_stripped) for text in responses
    )
    is_cut = is_thinking or _is_majority(reason in CUT_REASONS for reason in reasons)
    short = all(len(text.encode()) < _BYTES_PER_TOKEN * longest for text in responses)
    ended = bool(reasons) and all(reason in COMPLETE_REASONS for reason in reasons)
    is_known = any(reason in CUT_REASONS or reason in COMPLETE_REASONS for reason in reasons)
    is_whole = not is_cut and (ended or (short and not is_known))
    is_found = any(text.strip().lower() not in NO_ANSWER_TEXTS for text in filtered)
    is_empty = not any(text.strip() for text in responses)
    state: State = ""
    if is_cut and not (is_found and not is_thinking and _begins_with_answer(responses, filtered)):
        state = "cut"
    elif is_empty:
        state = "empty"
    elif not is_found and not _is_literal(responses, filtered):
        state = "unparsed"
    return Ending(state=state, is_cut=is_cut, is_whole=is_whole, is_thinking=is_thinking)


def _is_majority(values: Iterator[bool]) -> bool:
    counted = list(values)
    return sum(counted) > MAJORITY * len(counted)


def _is_unfinished(prompt: str, text: str, *, is_stripped: bool) -> bool:
    """Return True if a response starts thinking and does not end it.

    Thinking may also start at the end of the prompt.
    """
    for start, end in _THINKING:
        begins = start in text or (not is_stripped and prompt.rstrip().endswith(start))
        if begins and end not in text.rpartition(start)[2]:
            return True
    return False


def _begins_with_answer(responses: Sequence[str], filtered: Sequence[str]) -> bool:
    pairs = zip(responses, filtered, strict=False)
    return any(
        answer.strip()
        and text.strip() != answer.strip()
        and text.strip().startswith(answer.strip())
        for text, answer in pairs
    )


def _is_literal(responses: Sequence[str], filtered: Sequence[str]) -> bool:
    """Return True if a text such as `invalid` was generated by the model and not by a filter."""
    return any(text.strip() and text.strip() in filtered for text in responses)
