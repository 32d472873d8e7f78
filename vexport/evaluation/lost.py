"""Generated answers that are no answers: cut before their end, empty, or without anything to
extract.

An answer is lost if it did not score and
- it was cut: the engine or server ended it at its longest length (`finish_reason` length), or it
thinks and
  never ends its thinking;
- it is empty;
- it may have been cut (nobody recorded why it ended), and the task's filter found no answer in it.
If an
  answer ended by itself, the filter's miss is a wrong answer, unless that happens in most of the
  answers:
  then the filter does not fit the model.

A cut answer is not lost if the extracted answer stands at its beginning, as in tasks that read the
first number of a few tokens. Nor are cut answers lost if they score about as often as whole ones:
the cut comes after the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vexport.evaluation.statistics import Scores
from vexport.records import AnswerCounts

Marks = NDArray[np.bool_]
State = Literal["", "cut", "empty", "unparsed"]
"""What is wrong with an answer, whether or not it scored."""
WARN_FROM = 0.01
"""Share of lost answers on either side that is worth a warning."""
CUT = frozenset(
    ("length", "max_tokens", "max_length", "model_length", "repetition", "content_filter")
)
ENDED = frozenset(
    ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_str", "matched_stop")
)
"""Finish reasons by which vLLM and other servers say that an answer was cut, or that it ended by
itself.
"""
NOTHING_FOUND = frozenset(("", "[invalid]", "invalid", "[invalidanswer]"))
"""Results of lm-eval's filters that found no answer, in lower case."""
DEFAULT_LENGTH = 256
"""Most new tokens of an answer if neither the task nor the model's arguments say so (lm-eval)."""
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# Fewer bytes than this for each token of the longest answer: it certainly was not cut.
_BYTES_PER_TOKEN = 2
_MOST = 0.5
# Whole answers to compare cut ones with.
_ENOUGH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one generated answer ended.

    `is_cut` is True for every cut answer, `state` is "cut" unless the extracted answer stands
    before the cut. `is_whole` is True if the answer certainly ended by itself. `is_thinking` marks
    unfinished thinking.
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
"""Every ending that `count_answers` distinguishes, by the letter that files have for it.

`a` is cut after the answer, `t` in its thinking; `U` may have been cut, `u` ended by itself.
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
    """Read how an answer ended, from its raw `responses` (several if it was sampled repeatedly).

    `reasons` are their finish reasons, empty if none was recorded. `is_stripped` is True if a
    think_end_token removed finished thinking from the responses.
    """
    is_thinking = _most(_is_unfinished(prompt, text, is_stripped=is_stripped) for text in responses)
    is_cut = is_thinking or _most(reason in CUT for reason in reasons)
    short = all(len(text.encode()) < _BYTES_PER_TOKEN * longest for text in responses)
    ended = bool(reasons) and all(reason in ENDED for reason in reasons)
    is_known = any(reason in CUT or reason in ENDED for reason in reasons)
    is_whole = not is_cut and (ended or (short and not is_known))
    is_found = any(text.strip().lower() not in NOTHING_FOUND for text in filtered)
    is_empty = not any(text.strip() for text in responses)
    state: State = ""
    if is_cut and not (is_found and not is_thinking and _stands_first(responses, filtered)):
        state = "cut"
    elif is_empty:
        state = "empty"
    elif not is_found and not _is_literal(responses, filtered):
        state = "unparsed"
    return Ending(state=state, is_cut=is_cut, is_whole=is_whole, is_thinking=is_thinking)


def _most(values: Iterator[bool]) -> bool:
    counted = list(values)
    return sum(counted) > _MOST * len(counted)


def _is_unfinished(prompt: str, text: str, *, is_stripped: bool) -> bool:
    """Return whether a response begins to think, there or at the end of its prompt, and does not
    end it.
    """
    for start, end in _THINKING:
        begins = start in text or (not is_stripped and prompt.rstrip().endswith(start))
        if begins and end not in text.rpartition(start)[2]:
            return True
    return False


def _stands_first(responses: Sequence[str], filtered: Sequence[str]) -> bool:
    """Return whether the filter took the beginning of a response and left a rest."""
    pairs = zip(responses, filtered, strict=False)
    return any(
        answer.strip()
        and text.strip() != answer.strip()
        and text.strip().startswith(answer.strip())
        for text, answer in pairs
    )


def _is_literal(responses: Sequence[str], filtered: Sequence[str]) -> bool:
    """Return whether a text such as `invalid` is what the model answered, and not what a filter put
    there.
    """
    return any(text.strip() and text.strip() in filtered for text in responses)


def count_answers(
    endings: Sequence[Ending], scores: Scores, *, sign: int, alpha: float
) -> AnswerCounts:
    """Count the answers of one model that did not score, by how they ended, and those that are
    lost.
    """
    is_right = scores > 0 if sign > 0 else scores <= 0
    pairs = zip(endings, is_right, strict=True)
    states = np.array(["" if right else ending.state for ending, right in pairs])
    cut, empty, unparsed = (int((states == state).sum()) for state in ("cut", "empty", "unparsed"))
    doubtful = sum(
        state == "unparsed" and not ending.is_whole
        for state, ending in zip(states, endings, strict=True)
    )
    lost = empty + (unparsed if unparsed > _MOST * len(endings) else doubtful)
    is_cut = np.array([ending.is_cut for ending in endings])
    is_thinking = any(ending.is_thinking for ending in endings)
    if is_thinking or not _is_cut_after_answers(is_right[is_cut], is_right[~is_cut], alpha):
        lost += cut
    return AnswerCounts(
        answers=len(endings),
        cut=cut,
        empty=empty,
        unparsed=unparsed,
        lost=lost,
        thinking=sum(ending.is_thinking for ending in endings),
    )


def _is_cut_after_answers(cut: Marks, whole: Marks, alpha: float) -> bool:
    """Return whether cut answers are right about as often as whole ones.

    At least half as often, and not significantly less (Fisher's exact test). If nearly all answers
    are cut, at least half of them must be right.
    """
    if not cut.any():
        return False
    share = float(cut.mean())
    if len(whole) < _ENOUGH:
        return share >= _MOST
    table = [[int(cut.sum()), int((~cut).sum())], [int(whole.sum()), int((~whole).sum())]]
    is_less = float(stats.fisher_exact(table, alternative="less").pvalue) <= alpha
    return share >= _MOST * float(whole.mean()) and not is_less


def lost_words(baseline: AnswerCounts | None, candidate: AnswerCounts | None) -> str:
    """Describe what is wrong with answers, and what to do, if that concerns 1 % on either side;
    else "".
    """
    sides = [side for side in (candidate, baseline) if side is not None]
    if not any(side.lost + side.unparsed >= WARN_FROM * side.answers for side in sides):
        return ""
    sentences, remedies = list[str](), dict[str, None]()
    for kind in ("cut", "empty", "unparsed"):
        shares = [_share(side, kind) for side in (candidate, baseline)]
        if max(share or 0.0 for share in shares) < WARN_FROM:
            continue
        new, old = shares
        sentences.append(_SENTENCES[kind](_percent(new), None if old is None else _percent(old)))
        thinks = kind == "cut" and any(side.thinking for side in sides)
        remedies |= dict.fromkeys([_REMEDIES["thinking" if thinks else kind]])
    return f"{', and '.join(sentences)}: {'; '.join(remedies)}" if sentences else ""


def _share(side: AnswerCounts | None, kind: str) -> float | None:
    """Return the share of a kind of answers, but 0 of cut ones that count as answers."""
    if side is None:
        return None
    if kind == "cut" and side.lost < side.cut:
        return 0.0
    return {"cut": side.cut, "empty": side.empty, "unparsed": side.unparsed}[kind] / max(
        1, side.answers
    )


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.3g}%"


def _cut(new: str, old: str | None) -> str:
    if new == old:
        return f"the quantized model and the baseline were both cut in {new} of their answers"
    rest = "" if old is None else f", the baseline in {old}"
    return f"the quantized model was cut in {new} of its answers{rest}"


def _empty(new: str, old: str | None) -> str:
    if new == old:
        return f"{new} of the answers of both models are empty"
    return f"{new} of the quantized model's answers are empty" + (
        f", {old} of the baseline's" if old else ""
    )


def _unparsed(new: str, old: str | None) -> str:
    if new == old:
        return f"the task's filter finds no answer in {new} of the answers of both models"
    rest = "" if old is None else f" and {old} of the baseline's"
    return f"the task's filter finds no answer in {new} of the quantized model's answers{rest}"


_SENTENCES = {"cut": _cut, "empty": _empty, "unparsed": _unparsed}
_REMEDIES = {
    "cut": "raise max_gen_toks",
    "thinking": "raise max_gen_toks until thinking ends, and set think_end_token",
    "empty": "raise max_gen_toks if the model thinks first, and look at the answers",
    "unparsed": "choose another filter (--gate TASK=METRIC,FILTER), or show the format in "
    "few-shot examples",
}
