"""Parts of texts are found as whole words and numbers, and recorded texts can be sent."""

import pytest

from tests.recorded_texts import Produced, parts_of
from tests.texts import assert_contains

TEXT = "addition loses 12.5 points (at least -2),\n1,382 read; use --text-tokens in a/model.json"


@pytest.mark.parametrize(
    "part",
    ["addition", "loses 12.5", "12.5 points", "-2", "1,382", "(at least", "read;", "--text-tokens"],
)
def test_whole_parts_are_found(part: str) -> None:
    assert_contains(TEXT, part)
    assert_contains(TEXT, "addition", part, "points (at least -2), 1,382", "model.json")


@pytest.mark.parametrize(
    "part", ["addi", "5", "12", "2.5", "2", "382", "1", "point", "--text", "tokens", "json", "gone"]
)
def test_pieces_are_not_found(part: str) -> None:
    with pytest.raises(AssertionError, match=rf"^\['{part}'\] not found in"):
        assert_contains(TEXT, "addition", part)


def test_recorded_text_can_be_sent() -> None:
    text = Produced("calibration", "calibration/text", "InputError (exit 2)", "\ud800é", "", "")
    assert parts_of(text)[3].encode() == b"\\ud800\xc3\xa9"
