"""Find responses that do not count: cut before their end, empty, or without an answer.

A response is the text that the model generates for a document. The answer is the part that the
task's filter extracts from it. A response is lost if it is not correct (its score is 0, or
above 0 for a metric whose lower values are better) and one of these is true:
- It was cut. Either the engine or server stopped it at its maximum length (`finish_reason` length),
  or the model never ended its thinking.
- It is empty.
- The filter found no answer in it, and it may have been cut, because no finish reason was recorded.

If a response is complete and the filter finds no answer, the response is wrong, but not lost. There
is an exception: if the filter finds no answer in most responses, it does not fit the model. Then
these responses are lost, too.

Some cut responses are not lost:
- The answer is at the beginning of the response. For example, a task may read the first number from
  a few generated tokens.
- Cut responses score about as often as complete responses. Then the cut usually comes after the
  answer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vexport.records import AnswerCounts, Answers
from vexport.scores.aggregates import Scores
from vexport.scores.endings import MAJORITY, Ending

Marks = NDArray[np.bool_]
MIN_WARNED_SHARE = 0.01
"""Minimum share of lost responses for a warning."""
# Minimum number of complete responses for a comparison with cut responses.
_MIN_WHOLE_RESPONSES = 10


def count_answers(
    endings: Sequence[Ending], scores: Scores, *, sign: int, alpha: float
) -> AnswerCounts:
    """Count a model's incorrect responses by how they ended, and its lost responses.

    `sign` is 1 if higher scores are better, else -1.
    """
    is_right = scores > 0 if sign > 0 else scores <= 0
    pairs = zip(endings, is_right, strict=True)
    states = np.array(["" if right else ending.state for ending, right in pairs])
    cut, empty, unparsed = (int((states == state).sum()) for state in ("cut", "empty", "unparsed"))
    doubtful = sum(
        state == "unparsed" and not ending.is_whole
        for state, ending in zip(states, endings, strict=True)
    )
    lost = empty + (unparsed if unparsed > MAJORITY * len(endings) else doubtful)
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
    """Return True if cut responses are correct about as often as complete responses.

    They must be correct at least half as often, and not significantly less often (Fisher's exact
    test). If there are too few complete responses for a comparison, at least half of the cut
    responses must be correct.
    """
    if not cut.any():
        return False
    share = float(cut.mean())
    if len(whole) < _MIN_WHOLE_RESPONSES:
        return share >= MAJORITY
    table = [[int(cut.sum()), int((~cut).sum())], [int(whole.sum()), int((~whole).sum())]]
    is_less = float(stats.fisher_exact(table, alternative="less").pvalue) <= alpha
    return share >= MAJORITY * float(whole.mean()) and not is_less


def too_many_lost_text(answers: Answers) -> str:
    """Describe lost responses that exceed the margin, also below 1 % of each kind."""
    sides = [side for side in (answers.candidate, answers.baseline) if side is not None]
    is_small = max(map(_largest_lost_share, sides)) < MIN_WARNED_SHARE
    return lost_answers_text(answers, least=0.0 if is_small else MIN_WARNED_SHARE)


def _largest_lost_share(side: AnswerCounts) -> float:
    """Return the largest share of lost responses of one kind: cut, empty, or unparsed."""
    cut = side.cut if side.lost >= side.cut else 0
    unparsed = side.lost - cut - side.empty
    return max(cut, side.empty, unparsed) / max(1, side.answers)


def lost_answers_text(answers: Answers, least: float = MIN_WARNED_SHARE) -> str:
    """Describe lost and unparsed responses, and the remedy.

    Return "" if the share of both models is below `least`.
    """
    baseline, candidate = answers.baseline, answers.candidate
    sides = [side for side in (candidate, baseline) if side is not None]
    if not any(side.lost + side.unparsed >= least * side.answers for side in sides):
        return ""
    sentences: list[str] = []
    remedies: list[str] = []
    for kind in ("cut", "empty", "unparsed"):
        shares = [_share(side, kind) for side in (candidate, baseline)]
        largest = max(share or 0.0 for share in shares)
        if not largest or largest < least:
            continue
        new, old = shares
        sentences.append(_SENTENCES[kind](_percent(new), None if old is None else _percent(old)))
        thinks = kind == "cut" and any(side.thinking for side in sides)
        if kind == "empty" and remedies:
            remedies.append(_EMPTY_AND_CUT_REMEDY)
        else:
            remedies.append(_REMEDIES["thinking" if thinks else kind])
    return f"{', and '.join(sentences)}: {'; '.join(remedies)}" if sentences else ""


def _share(side: AnswerCounts | None, kind: str) -> float | None:
    """Return the share of a model's responses that are `cut`, `empty` or `unparsed`.

    The share of cut responses is 0 if none of them is lost, because their answers come before the
    cut.
    """
    if side is None:
        return None
    if kind == "cut" and side.lost < side.cut:
        return 0.0
    return {"cut": side.cut, "empty": side.empty, "unparsed": side.unparsed}[kind] / max(
        1, side.answers
    )


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.3g}%"


def _cut_text(new: str, old: str | None) -> str:
    if new == old:
        return f"the candidate and the baseline were both cut in {new} of their responses"
    rest = "" if old is None else f", the baseline in {old}"
    return f"the candidate was cut in {new} of its responses{rest}"


def _empty_text(new: str, old: str | None) -> str:
    if new == old:
        return f"{new} of the responses of both models are empty"
    return f"{new} of the candidate's responses are empty" + (
        f", {old} of the baseline's" if old else ""
    )


def _unparsed_text(new: str, old: str | None) -> str:
    if new == old:
        return f"the task's filter finds no answer in {new} of the responses of both models"
    rest = "" if old is None else f" and {old} of the baseline's"
    return f"the task's filter finds no answer in {new} of the candidate's responses{rest}"


_SENTENCES = {"cut": _cut_text, "empty": _empty_text, "unparsed": _unparsed_text}
# Remedy for empty responses if other responses were cut. The remedy for cut responses already
# says to raise max_gen_toks.
_EMPTY_AND_CUT_REMEDY = "look at the empty responses"
_REMEDIES = {
    "cut": "raise max_gen_toks",
    "thinking": "raise max_gen_toks until thinking ends, and set think_end_token",
    "empty": "raise max_gen_toks if the model thinks first, and look at the responses",
    "unparsed": "choose another filter (--gate TASK=METRIC,FILTER), or show the format in "
    "few-shot examples",
}
