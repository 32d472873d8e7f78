"""Answers that were cut, are empty, or have nothing that a filter finds."""

from dataclasses import replace

import numpy as np
import pytest

from tests.evaluation.test_verdict import SAMPLE, paired
from vexport.evaluation.lost import Ending, count_answers, ending_of
from vexport.evaluation.pairs import TaskPair
from vexport.evaluation.verdict import judge
from vexport.records import AnswerCounts, Verdict
from vexport.reports import render_verdicts

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
def test_endings(text: str, filtered: str, reason: str, state: str) -> None:
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
def test_thinking_that_the_prompt_begins(is_stripped: bool, state: str) -> None:
    """A think_end_token removes finished thinking, so that its absence shows nothing."""
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
    scores = np.array([1.0] * right + [0.0] * (len(endings) - right))
    return count_answers(endings, scores, sign=1, alpha=0.05)


def test_short_answers_by_design_are_not_lost() -> None:
    """All answers reach the limit of tokens, and most are right."""
    assert counted([CUT] * 100, right=70).lost == 0
    assert counted([CUT] * 100, right=6).lost == 94


def test_cut_answers_that_score_like_whole_ones_are_not_lost() -> None:
    """Some answers continue with other text after the answer."""
    rambling = [WHOLE] * 30 + [CUT] * 5 + [WHOLE] * 50 + [CUT] * 15
    assert counted(rambling, right=35).lost == 0
    thinking = [WHOLE] * 66 + [WHOLE] * 4 + [CUT] * 30
    assert counted(thinking, right=66).lost == 30


def test_misses_of_a_filter_count_if_they_are_the_most() -> None:
    miss = Ending(state="unparsed", is_whole=True)
    assert counted([WHOLE] * 70 + [miss] * 30, right=60).lost == 0
    assert counted([WHOLE] * 10 + [miss] * 90, right=6).lost == 90
    doubtful = replace(miss, is_whole=False)
    assert counted([WHOLE] * 70 + [doubtful] * 30, right=60).lost == 30


def lossy(old: list[Ending], new: list[Ending], right: int) -> TaskPair:
    """Return two models whose first answers are right, with endings in the same order."""
    scores = [1.0] * right + [0.0] * (len(old) - right)
    pairs = zip(old, new, strict=True)
    documents = tuple((replace(SAMPLE, ending=x), replace(SAMPLE, ending=y)) for x, y in pairs)
    return replace(paired(scores, scores), documents=documents)


def verdict_with(ending: Ending, lost: int, margin: float = 0.02) -> Verdict:
    endings = [WHOLE] * (DOCUMENTS - lost) + [ending] * lost
    pair = lossy(endings, endings, right=DOCUMENTS - lost)
    return judge([pair], margin=margin, alpha=0.05)


@pytest.mark.parametrize("ending", [CUT, EMPTY])
def test_no_pass_beyond_the_margin(ending: Ending) -> None:
    assert verdict_with(WHOLE, 30).outcome == "PASS"
    few = verdict_with(ending, 15)
    assert few.outcome == "PASS"
    assert "1.5%" in few.tasks[0].lost_answers
    assert verdict_with(ending, 9).tasks[0].lost_answers == ""
    many = verdict_with(ending, 30)
    assert (many.outcome, many.tasks[0].documents_needed) == ("INCONCLUSIVE", None)
    assert "3%" in many.reason
    assert "max_gen_toks" in many.reason
    assert verdict_with(ending, 30, margin=0.05).outcome == "PASS"


def test_all_cut_is_not_blamed_on_the_template() -> None:
    pair = lossy([CUT] * 200, [CUT] * 200, right=0)
    verdict = judge([pair], margin=0.02, alpha=0.05)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "raise max_gen_toks" in verdict.reason
    assert "template" not in verdict.reason


def test_a_loss_names_its_cut_answers() -> None:
    endings = [WHOLE] * 700 + [CUT] * 300
    pair = lossy([WHOLE] * 1000, endings, right=700)
    pair = replace(pair, baseline=np.ones(1000))
    verdict = judge([pair], margin=0.02, alpha=0.05)
    assert verdict.outcome == "FAIL"
    assert "the quantized model was cut in 30% of its answers, the baseline in 0%" in verdict.reason
    for format_ in ("text", "markdown", "html", "json"):
        assert "300" in render_verdicts([verdict], format_)
