"""The shipped task `sight`: do the responses depend on the picture?

A document has a picture, drawn from a seed, and a question with fixed choices: the colour of a
shape, the number of shapes, a digit, or a side. The question is asked three times: with the
picture, without a picture, and with another picture that has another right answer. Questions are
the same for all pictures, so that most of these requests are also requests of other documents, and
a model gets them only once.

`exact_match` is 1 if the response to the picture is right, and decides as in other tasks. The other
metrics show whether the model sees:

- `changes_with_picture` is 1 if the other picture gets another response.
- `changes_without_picture` is 1 if the question without a picture gets another response.
- `rejects_other_picture` is 1 if the response to the other picture is not the right answer here.

A model is blind if its responses do not change with the picture, or are the same without a picture.
The limit is the share of responses that the noise of an engine may change. A blind candidate fails
whatever its score. With a blind baseline, nothing is decided. A model is seen to see if its
responses are right more often with the picture than with the other picture, by an exact sign test.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue
from scipy import stats

from vexport.inference.repeated import MAX_CHANGED_SHARE
from vexport.inference.shipped.base import (
    CORRECT,
    Document,
    Obstacle,
    PartOutcome,
    ScoreRows,
    ShippedPart,
    ShippedTask,
)
from vexport.inference.stored_responses import FinishedText
from vexport.records import Reason
from vexport.rules import sight as rules
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import SIGHT

DOCUMENTS = 400
_CHANGES, _WITHOUT, _REJECTS = (
    "changes_with_picture",
    "changes_without_picture",
    "rejects_other_picture",
)
_CHOICES = "choices"
_SEPARATOR = "|"
# Number of tokens that is enough for the patches of a picture in usual models, and a response.
_LONGEST = 4096


class Sight(ShippedTask):
    """Questions about pictures, with and without the picture."""

    name = SIGHT
    metrics = (CORRECT, _CHANGES, _WITHOUT, _REJECTS)
    max_gen_toks = 32
    takes_pictures = True

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    def options(self, settings: Evaluate) -> Mapping[str, JsonValue]:
        """Return nothing: the pictures depend on the seed alone."""
        return {}

    def documents(self, part: ShippedPart) -> Sequence[Document]:
        """Return questions about pictures. Raises MissingExtra if Pillow is not installed."""
        from vexport.inference.shipped.sight.questions import documents_of

        return documents_of(DOCUMENTS, part.seed)

    def score(
        self, part: ShippedPart, document: Document, responses: Sequence[FinishedText]
    ) -> Mapping[str, float]:
        """Compare the responses to the picture, to no picture and to another picture."""
        choices = document.details[_CHOICES].split(_SEPARATOR)
        seen, without, other = (chosen(response, choices) for response in responses)
        return {
            CORRECT: float(seen == document.target),
            _CHANGES: float(seen != other),
            _WITHOUT: float(seen != without),
            _REJECTS: float(other != document.target),
        }

    def longest_sequence(self, part: ShippedPart) -> int:
        """Return a number of tokens that is enough for a picture in usual models."""
        return _LONGEST

    def fault(self, scores: Mapping[str, float]) -> str:
        """Tell responses that ignore the picture from other wrong responses."""
        return "wrong" if scores.get(_CHANGES, 1) else "the same for another picture"

    def explain_loss(self, parts: Sequence[PartOutcome]) -> str:
        """Return `12 of 400 responses are wrong that were right before`."""
        (part,) = parts
        counted = [f"{number} {fault}" for fault, number in sorted(part.faults.items())]
        if part.outcome != "FAIL" or not counted:
            return ""
        return f"of {part.documents:,} responses that were right before: {', '.join(counted)}"

    def obstacle(self, baseline: ScoreRows, candidate: ScoreRows, alpha: float) -> Obstacle | None:
        """Return why the score does not decide: a model is blind, or not seen to see."""
        if how := _not_seeing(baseline, alpha):
            return Obstacle("INCONCLUSIVE", Reason.of(rules.BLIND_BASELINE, how=how))
        if how := _blind(candidate, alpha):
            return Obstacle("FAIL", Reason.of(rules.BLIND, how=how))
        if how := _not_seeing(candidate, alpha):
            return Obstacle("INCONCLUSIVE", Reason.of(rules.NOT_SEEN, how=how))
        return None


def chosen(response: str, choices: Sequence[str]) -> str:
    """Return the choice that a response names, or the whole response if it names not exactly one.

    Case and other words do not count: `It is Red.` names `red`.
    """
    words = re.findall(r"\w+", response.lower())
    named = {choice for choice in choices if choice in words}
    return named.pop() if len(named) == 1 else " ".join(response.split())


def _blind(rows: ScoreRows, alpha: float) -> str:
    """Describe how the responses show that a model is blind, or return "".

    A model that sees could give the same response to a few pictures by chance, so that very few
    documents show nothing.
    """
    known = [row for row in rows if _CHANGES in row and _WITHOUT in row]
    total = len(known)
    if not total or 0.5**total > alpha:
        return ""
    descriptions = _same_responses(known)
    for metric, description in descriptions:
        changed = round(sum(row[metric] for row in known))
        test = stats.binomtest(changed, total, MAX_CHANGED_SHARE, alternative="greater")
        if test.pvalue > alpha:
            return description
    return ""


def _same_responses(rows: ScoreRows) -> Iterator[tuple[str, str]]:
    total = len(rows)
    for metric, words in (
        (_WITHOUT, "equal the responses without a picture"),
        (_CHANGES, "do not depend on the picture, and stay the same with another picture"),
    ):
        same = total - round(sum(row[metric] for row in rows))
        yield metric, f"{same} of {total} responses {words}"


def _not_seeing(rows: ScoreRows, alpha: float) -> str:
    """Describe why the responses do not show that a model sees, or return ""."""
    if how := _blind(rows, alpha):
        return how
    known = [row for row in rows if _REJECTS in row]
    own = sum(row[CORRECT] > 1 - row[_REJECTS] for row in known)
    other = sum(row[CORRECT] < 1 - row[_REJECTS] for row in known)
    if not known or (own and _sign_test(own, own + other) <= alpha):
        return ""
    right = round(sum(row[CORRECT] for row in known))
    swapped = round(sum(1 - row[_REJECTS] for row in known))
    return (
        f"{right} of {len(known)} responses are right with the picture, and {swapped} with another "
        "picture"
    )


def _sign_test(own: int, total: int) -> float:
    return float(stats.binomtest(own, total, alternative="greater").pvalue)
