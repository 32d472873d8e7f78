"""Assertions on the parts of a text that a user needs, such as a number, a path or an option."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vexport.errors import VexportError
from vexport.rules.book import Rule


def assert_contains(text: str, *parts: str) -> None:
    """Check that `text` contains every part, in any order.

    A part matches whole words and numbers only: "2" is not found in "12", "2.5" or "-2", and
    "--text" not in "--text-tokens". A line break in `text` counts as a space.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    flat = " ".join(text.split())
    missing = [part for part in parts if not re.search(_whole(part), flat)]
    assert not missing, f"{missing} not found in:\n{text}"


@contextmanager
def assert_raises(error: type[Exception], *parts: str) -> Iterator[None]:
    """Check that the block raises `error` with a message that contains every part."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield
    assert_contains(str(caught.value), *parts)


@contextmanager
def breaks(rule: Rule, *parts: str) -> Iterator[None]:
    """Check that the block raises an error of this rule, whose message contains every part.

    The parts are facts, such as a number or a path. The words of a rule are not asserted.
    """
    __tracebackhide__ = True
    with pytest.raises(VexportError) as caught:
        yield
    assert caught.value.rule == rule.id, str(caught.value)
    assert_contains(str(caught.value), *parts)


def _whole(part: str) -> str:
    """Return a pattern for the part between the boundaries of words and numbers."""
    before = r"(?<![\w-])(?<!\w[.,])" if re.match(r"\w", part) else ""
    after = r"(?!\w)(?![-.,]\w)" if re.search(r"\w$", part) else ""
    return before + re.escape(part) + after
