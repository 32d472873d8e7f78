"""Find tasks in which both models give the same response to nearly every document.

Such scores do not show what the models can do, although they may be high. An example is a model
that refuses every question, or that always chooses the first option.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from vexport.judge.pairs import TaskPair
from vexport.records.values import join_limited
from vexport.scores.table import Row
from vexport.words import clip

MIN_SHARE = 0.9
"""Minimum share of a response in the responses of both models, for a warning."""
# With fewer responses, a share of nine tenths means nothing.
_MIN_RESPONSES = 10
_MAX_NAMED = 3
_MAX_SHOWN = 60


def same_response_warnings(pairs: Sequence[TaskPair]) -> Iterator[str]:
    """Yield a warning for each response that makes up nearly all responses to a task."""
    tasks: dict[str, list[str]] = {}
    for pair in pairs:
        if shown := _same_response(pair):
            tasks.setdefault(shown, []).append(pair.task)
    for shown, names in tasks.items():
        yield (
            f"{join_limited(names, ' and ', _MAX_NAMED)}: both models give the same response "
            f"({shown}) to at least {MIN_SHARE:.0%} of the documents, and other responses are "
            "correct: the scores do not show what the models can do; look at the prompts"
        )


def _same_response(pair: TaskPair) -> str:
    """Return the response that makes up nearly all responses of both models, as messages show it.

    Return "" if there is none, or if it is the correct response to nearly all documents.
    """
    count = len(pair.documents)
    if count < _MIN_RESPONSES:
        return ""
    sides = [[_response(row) for row in side] for side in zip(*pair.documents, strict=True)]
    found, times = Counter(sides[0]).most_common(1)[0]
    if found is None or min(times, sides[1].count(found)) < MIN_SHARE * count:
        return ""
    if _is_correct(pair, [response == found for response in sides[0]]):
        return ""
    first = next(old for old, _ in pair.documents if old.compared_text == found)
    if first.options:
        return f"option {int(found) + 1}" if found.isdecimal() else "one option"
    return clip(repr(first.shown_text), _MAX_SHOWN)


def _response(row: Row) -> str | None:
    """Return the response to compare, or None if it was not kept or not given.

    Empty responses and responses without an answer have warnings of their own.
    """
    is_lost = row.ending is not None and row.ending.state in ("empty", "unparsed")
    is_scored_text = row.log_likelihood is not None
    return None if is_lost or is_scored_text else row.compared_text


def _is_correct(pair: TaskPair, is_given: Sequence[bool]) -> bool:
    """Return True if nearly all documents have the same correct response.

    The targets show it if they were kept. For options and without targets, the scores show it:
    `is_given` marks the documents with the same response, and their scores would all be alike.
    """
    rows = [old for old, _ in pair.documents]
    if all(row.target for row in rows) and not any(row.options for row in rows):
        targets = Counter(row.target for row in rows)
        return targets.most_common(1)[0][1] >= MIN_SHARE * len(rows)
    scores = pair.baseline[np.array(is_given)]
    is_right = scores > 0 if pair.sign > 0 else scores <= 0
    return float(is_right.mean()) >= MIN_SHARE
