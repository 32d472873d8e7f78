"""Answers that were cut, are empty, or contain nothing that the filter finds."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.judge.test_verdict import SAMPLE, paired
from vexport.judge.lost import count_answers, lost_answers_text
from vexport.judge.pairs import TaskPair
from vexport.judge.verdict import judge
from vexport.records import AnswerCounts, Verdict
from vexport.records.margin import Margins
from vexport.reports import render_verdicts
from vexport.scores.endings import Ending, ending_of

WHOLE, CUT = Ending(state="", is_whole=True), Ending(state="cut", is_cut=True)
EMPTY = Ending(state="empty")
DOCUMENTS = 1000


@pytest.mark.parametrize(
    ("text", "filtered", "reason", "state"),
    [
        ("12", "12", "stop", ""),
        ("12", "12", "", ""),
        ("", "", "stop", "empty"),
        ("", "", "", "empty"),
        ("", "", "length", "cut"),
        ("  ", "[invalid]", "", "empty"),
        ("We add the", "We add the", "length", "cut"),
        ("12 because 5", "12", "length", ""),
        ("We add 12 and", "12", "length", "cut"),
        ("I do not know.", "[invalid]", "stop", "unparsed"),
        ("<think> Let me see", "<think> Let me see", "", "cut"),
        ("<think> easy </think> 12", "12", "", ""),
    ],
)
def test_ending_states(text: str, filtered: str, reason: str, state: str) -> None:
    ending = ending_of(
        prompt="5 + 7 =",
        responses=[text],
        filtered=[filtered],
        reasons=[reason] if reason else [],
        longest=256,
        is_stripped=False,
    )
    assert ending.state == state


@pytest.mark.parametrize(("is_stripped", "state"), [(False, "cut"), (True, "")])
def test_thinking_begun_by_the_prompt(is_stripped: bool, state: str) -> None:
    """With a think_end_token, finished thinking is removed. A missing </think> shows nothing."""
    ending = ending_of(
        prompt="user: 5 + 7 =\n<think>\n",
        responses=["twelve"],
        filtered=["twelve"],
        reasons=[],
        longest=256,
        is_stripped=is_stripped,
    )
    assert ending.state == state


def counted(endings: list[Ending], right: int) -> AnswerCounts:
    """Count answers with the given endings. The first `right` answers are right."""
    scores = np.array([1.0] * right + [0.0] * (len(endings) - right))
    return count_answers(endings, scores, sign=1, alpha=0.05)


def test_short_token_limit_is_not_lost() -> None:
    """All answers reach the token limit. They are lost only if most of them are wrong."""
    assert counted([CUT] * 100, right=70).lost == 0
    assert counted([CUT] * 100, right=6).lost == 94


def test_cut_after_the_answer_is_not_lost() -> None:
    """Some models continue after the answer.

    Cut answers that score like whole answers are not lost.
    """
    rambling = [WHOLE] * 30 + [CUT] * 5 + [WHOLE] * 50 + [CUT] * 15
    assert counted(rambling, right=35).lost == 0
    thinking = [WHOLE] * 66 + [WHOLE] * 4 + [CUT] * 30
    assert counted(thinking, right=66).lost == 30


def test_filter_misses_count_if_frequent() -> None:
    """Whole answers that the filter misses are lost if they are the majority.

    Other answers that the filter misses are always lost.
    """
    miss = Ending(state="unparsed", is_whole=True)
    assert counted([WHOLE] * 70 + [miss] * 30, right=60).lost == 0
    assert counted([WHOLE] * 10 + [miss] * 90, right=6).lost == 90
    doubtful = replace(miss, is_whole=False)
    assert counted([WHOLE] * 70 + [doubtful] * 30, right=60).lost == 30


def pair_with(old: list[Ending], new: list[Ending], right: int) -> TaskPair:
    """Return a pair of models with the given endings. Their first `right` answers are right."""
    scores = [1.0] * right + [0.0] * (len(old) - right)
    pairs = zip(old, new, strict=True)
    documents = tuple((replace(SAMPLE, ending=x), replace(SAMPLE, ending=y)) for x, y in pairs)
    return replace(paired(scores, scores), documents=documents)


def verdict_with(ending: Ending, lost: int, margin: float = 0.02) -> Verdict:
    endings = [WHOLE] * (DOCUMENTS - lost) + [ending] * lost
    pair = pair_with(endings, endings, right=DOCUMENTS - lost)
    return judge([pair], margins=Margins.read(margin), alpha=0.05)


def lost_text(verdict: Verdict) -> str:
    answers = verdict.tasks[0].answers
    assert answers is not None
    return lost_answers_text(answers)


@pytest.mark.parametrize("ending", [CUT, EMPTY])
def test_lost_answers_beyond_margin_prevent_pass(ending: Ending) -> None:
    assert verdict_with(WHOLE, 30).outcome == "PASS"
    few = verdict_with(ending, 15)
    assert few.outcome == "PASS"
    assert "1.5%" in lost_text(few)
    assert lost_text(verdict_with(ending, 9)) == ""
    many = verdict_with(ending, 30)
    assert (many.outcome, many.tasks[0].needed) == ("INCONCLUSIVE", None)
    assert "3%" in many.reason
    assert "max_gen_toks" in many.reason
    assert verdict_with(ending, 30, margin=0.05).outcome == "PASS"


def test_lost_answers_beyond_small_margin_prevent_pass() -> None:
    assert verdict_with(CUT, 9, margin=0.01).outcome == "PASS"
    small = verdict_with(CUT, 9, margin=0.005)
    assert small.outcome == "INCONCLUSIVE"
    assert "both cut in 0.9% of their responses: raise max_gen_toks" in small.reason
    assert "empty" not in small.reason


def test_lost_answers_of_several_kinds_prevent_pass() -> None:
    endings = [WHOLE] * 984 + [CUT] * 8 + [EMPTY] * 8
    pair = pair_with(endings, endings, right=984)
    verdict = judge([pair], margins=Margins.read(0.01), alpha=0.05)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "both cut in 0.8%" in verdict.reason
    assert "0.8% of the responses of both models are empty" in verdict.reason


def test_lost_answers_are_named_beside_wrong_ones() -> None:
    """Whole responses without an answer are wrong, not lost."""
    miss = Ending(state="unparsed", is_whole=True)
    endings = [WHOLE] * 941 + [miss] * 50 + [CUT] * 9
    pair = pair_with(endings, endings, right=941)
    verdict = judge([pair], margins=Margins.read(0.005), alpha=0.05)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "both cut in 0.9% of their responses" in verdict.reason


def test_cut_answers_ask_for_longer_limit() -> None:
    """If all answers of both models were cut, the remedy is max_gen_toks, not the chat template."""
    pair = pair_with([CUT] * 200, [CUT] * 200, right=0)
    verdict = judge([pair], margins=Margins.read(0.02), alpha=0.05)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "raise max_gen_toks" in verdict.reason
    assert "template" not in verdict.reason


def test_fail_names_cut_answers() -> None:
    endings = [WHOLE] * 700 + [CUT] * 300
    pair = pair_with([WHOLE] * 1000, endings, right=700)
    pair = replace(pair, baseline=np.ones(1000))
    verdict = judge([pair], margins=Margins.read(0.02), alpha=0.05)
    assert verdict.outcome == "FAIL"
    assert re.search(r"candidate\b.* cut in 30%.* baseline in 0%", verdict.reason)
    for format_ in ("text", "markdown", "html", "json"):
        assert "300" in render_verdicts([verdict], format_)
