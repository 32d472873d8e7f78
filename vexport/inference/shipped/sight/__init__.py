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
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from vexport.inference.shipped.base import (
    CORRECT,
    Document,
    Obstacle,
    PartOutcome,
    ScoreRows,
    ShippedPart,
    ShippedTask,
)
from vexport.inference.shipped.sight.metrics import CHANGES, REJECTS, WITHOUT
from vexport.inference.stored_responses import FinishedText
from vexport.records import Reason
from vexport.rules import sight as rules
from vexport.scenario import Evaluate
from vexport.scenario.evaluate import SIGHT

DOCUMENTS = 400
_CHOICES = "choices"
_SEPARATOR = "|"
# Number of tokens that is enough for the patches of a picture in usual models, and a response.
_LONGEST = 4096


class Sight(ShippedTask):
    """Questions about pictures, with and without the picture."""

    name = SIGHT
    metrics = (CORRECT, CHANGES, WITHOUT, REJECTS)
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
            CHANGES: float(seen != other),
            WITHOUT: float(seen != without),
            REJECTS: float(other != document.target),
        }

    def longest_sequence(self, part: ShippedPart) -> int:
        """Return a number of tokens that is enough for a picture in usual models."""
        return _LONGEST

    def fault(self, scores: Mapping[str, float]) -> str:
        """Tell responses that ignore the picture from other wrong responses."""
        return "wrong" if scores.get(CHANGES, 1) else "the same for another picture"

    def explain_loss(self, parts: Sequence[PartOutcome]) -> str:
        """Return `12 of 400 responses are wrong that were right before`."""
        (part,) = parts
        counted = [f"{number} {fault}" for fault, number in sorted(part.faults.items())]
        if part.outcome != "FAIL" or not counted:
            return ""
        return f"of {part.documents:,} responses that were right before: {', '.join(counted)}"

    def obstacle(self, baseline: ScoreRows, candidate: ScoreRows, alpha: float) -> Obstacle | None:
        """Return why the score does not decide: a model is blind, or not seen to see."""
        # The engine's worker, which has no scipy, only asks.
        from vexport.inference.shipped.sight.blindness import describe_blind, describe_not_seeing

        if how := describe_not_seeing(baseline, alpha):
            return Obstacle("INCONCLUSIVE", Reason.of(rules.BLIND_BASELINE, how=how))
        if how := describe_blind(candidate, alpha):
            return Obstacle("FAIL", Reason.of(rules.BLIND, how=how))
        if how := describe_not_seeing(candidate, alpha):
            return Obstacle("INCONCLUSIVE", Reason.of(rules.NOT_SEEN, how=how))
        return None


def chosen(response: str, choices: Sequence[str]) -> str:
    """Return the choice that a response names, or the whole response if it names not exactly one.

    Case and other words do not count: `It is Red.` names `red`.
    """
    words = re.findall(r"\w+", response.lower())
    named = {choice for choice in choices if choice in words}
    return named.pop() if len(named) == 1 else " ".join(response.split())
