"""The verdict in one breath: a sentence for every outcome, in one unit, whole."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.reports import sample
from vexport.evaluation.reason import reason_for
from vexport.evaluation.verdict import overall_outcome
from vexport.records import Outcome, TaskVerdict
from vexport.records.values import about


def task(name: str, difference: float, low: float, high: float, *, needed: int | None = None) -> TaskVerdict:
    """A task of 1,382 documents, judged against a margin of 2 points."""
    outcome: Outcome = "PASS" if low > -0.02 else "FAIL" if high < -0.02 else "INCONCLUSIVE"
    made = sample.task(
        name, outcome, difference=difference, low=low, high=high, lost=6, gained=1, documents=1382
    )
    return replace(made, documents_needed=needed)


def own_units(name: str, difference: float, low: float, high: float) -> TaskVerdict:
    """A perplexity of about 27, where a rise is a loss."""
    made = task(name, difference, low, high)
    return replace(
        made,
        metric="word_perplexity",
        baseline=replace(made.baseline, value=27.31),
        candidate=replace(made.candidate, value=27.31 - difference),
    )


GOOD = task("addition", -0.0043, -0.0084, -0.0007)
SAME = task("facts", 0.0, -0.0042, 0.0078)
BETTER = task("choice", 0.0051, -0.0012, 0.0101)
CLEARLY_BETTER = task("choice", 0.0052, 0.0012, 0.0101)
BAD = task("addition", -0.221, -0.24, -0.203)
WORSE = task("facts", -0.3859, -0.418, -0.349)
OPEN = task("addition", -0.0141, -0.0252, -0.0047, needed=2810)
HOPELESS = task("facts", -0.02, -0.03, -0.01)


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (
            [GOOD, SAME, BETTER, BETTER],
            "all 4 tasks lose less than 2 points (worst: addition -0.43, at worst -0.84)",
        ),
        ([SAME, BETTER], "both tasks lose less than 2 points (worst: facts 0.00, at worst -0.42)"),
        (
            [BETTER, CLEARLY_BETTER],
            "both tasks lose less than 2 points (worst: choice +0.51, at worst -0.12)",
        ),
        ([GOOD], "addition loses 0.43 points (at most 0.84), 2 points were accepted"),
        ([SAME], "facts loses nothing (at most 0.42 points), 2 points were accepted"),
        ([BETTER], "choice gains 0.51 points (at worst it loses 0.12), 2 points were accepted"),
        ([CLEARLY_BETTER], "choice gains 0.52 points (at least 0.12), 2 points were accepted"),
        ([BAD], "addition loses 22.1 points (at least 20.3), 2 points were accepted"),
        (
            [BAD, SAME],
            "addition loses 22.1 points (at least 20.3), 2 points were accepted; the other task passes",
        ),
        (
            [SAME, BAD, GOOD],
            "addition loses 22.1 points (at least 20.3), 2 points were accepted; the other 2 tasks pass",
        ),
        ([BAD, OPEN], "addition loses 22.1 points (at least 20.3), 2 points were accepted"),
        ([BAD, WORSE], "both tasks lose more than 2 points (worst: facts -38.6, at best -34.9)"),
        ([BAD, WORSE, GOOD], "2 of 3 tasks lose more than 2 points (worst: facts -38.6, at best -34.9)"),
        (
            [OPEN, SAME],
            "addition is not settled after 1,382 documents: -1.41 points, between -2.52 and -0.47, "
            "2 points were accepted; about 2,900 would settle it; the other task passes",
        ),
        (
            [HOPELESS],
            "facts is not settled after 1,382 documents: -2.00 points, between -3.00 and -1.00, "
            "2 points were accepted; at this difference no number of documents would settle it",
        ),
        (
            [OPEN, HOPELESS],
            "2 of 2 tasks are not settled: addition (read 1,382 documents, about 2,900 needed), "
            "facts (read 1,382 documents, no number would settle it)",
        ),
        (
            [OPEN] * 5,
            "5 of 5 tasks are not settled: "
            + ", ".join(["addition (read 1,382 documents, about 2,900 needed)"] * 3)
            + " and 2 more",
        ),
        (
            [own_units("wikitext", -0.31, -0.4, -0.2)],
            "wikitext loses 0.31 in word_perplexity (at least 0.20), 0.02 in word_perplexity was accepted",
        ),
        (
            [GOOD, own_units("wikitext", 0.31, 0.2, 0.4)],
            "both tasks lose less than 2 points or 0.02 in word_perplexity "
            "(worst: addition -0.43, at worst -0.84)",
        ),
    ],
)
def test_every_outcome_has_one_sentence(tasks: Sequence[TaskVerdict], sentence: str) -> None:
    found = reason_for(overall_outcome(tasks), tasks, margin=0.02)
    assert found == sentence
    assert "%" not in found
    assert len(found) < 200


@pytest.mark.parametrize(
    ("margin", "tasks", "words"),
    [
        (0.01, [GOOD], "1 point was accepted"),
        (0.005, [task("addition", -0.001, -0.002, 0.0)], "0.5 points were accepted"),
        (0.0, [task("addition", -0.03, -0.04, -0.021)], "no loss was accepted"),
        (0.0, [CLEARLY_BETTER, CLEARLY_BETTER], "both tasks lose nothing"),
    ],
)
def test_what_was_accepted_reads_as_english(margin: float, tasks: Sequence[TaskVerdict], words: str) -> None:
    assert words in reason_for(overall_outcome(tasks), tasks, margin=margin)


def test_a_bound_next_to_the_margin_does_not_read_like_it() -> None:
    """Less than 2 points, at worst -2.00, would contradict itself."""
    close = task("addition", -0.0101, -0.019996, 0.0)
    assert "at worst -1.9996)" in reason_for("PASS", [close, SAME], margin=0.02)


@pytest.mark.parametrize(
    ("documents", "words"),
    [(7, "about 7"), (303, "about 310"), (2810, "about 2,900"), (70941, "about 71,000")],
)
def test_an_estimate_has_two_digits_and_is_enough(documents: int, words: str) -> None:
    assert about(documents) == words
