"""The finish reason of a text survives lm-eval's copies of answers."""

import copy
import pickle
from collections.abc import Callable

import pytest

from vexport.inference.stored_responses import FinishedText


def through_pickle(text: FinishedText) -> FinishedText:
    copied: FinishedText = pickle.loads(pickle.dumps(text))
    return copied


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_copies_keep_finish_reason(copied: Callable[[FinishedText], FinishedText]) -> None:
    text = FinishedText("4 6", "length")
    result = copied(text)
    assert (type(result), result, result.finish_reason) == (FinishedText, "4 6", "length")
    (nested,) = copy.deepcopy([text])
    assert nested.finish_reason == "length"


def test_converted_text_has_no_finish_reason() -> None:
    """lm-eval converts a task's targets to the type of the answers."""
    target = type(FinishedText("4 6", "stop"))("7")
    assert (target, target.finish_reason) == ("7", "")
