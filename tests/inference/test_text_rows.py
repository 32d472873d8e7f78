"""Rows of held-out text: their lengths, notes about short rows, and the engine for long rows."""

import logging
from pathlib import Path

import pytest

from tests.texts import breaks
from vexport.inference.response_sources import arguments_for_text
from vexport.inference.text_rows import read_rows, truncated_rows
from vexport.rules import prompts as rules
from vexport.scenario import Evaluate
from vexport.scenario.serve import EngineArguments

DEMO = Path(__file__).parents[2] / "scenarios" / "demo"


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "length", "notes"),
    [
        (256, 4, None, 256, []),
        (512, 4, None, 511, ["511 tokens, not 512"]),
        (8192, 4, None, 511, ["maximum sequence length is 512"]),
        (8192, 2, 4096, 4095, ["4,095 tokens, not 8,192"]),
        (500, 10_000, None, 500, ["rows, not 10000"]),
    ],
)
def test_rows_have_the_requested_length_or_a_note(
    tokens: int,
    rows: int,
    longest: int | None,
    length: int,
    notes: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Evaluate(text=str(DEMO / "calibration.jsonl"), text_tokens=tokens, text_rows=rows)
    with caplog.at_level(logging.WARNING):
        found = read_rows(
            settings,
            DEMO / "model",
            longest=longest,
            vocabulary=384,
            trust_tokenizer=False,
            shows_notes=True,
        )
    assert {len(row) for row in found} == {length}
    assert len(found) == rows or notes
    assert len(caplog.messages) == len(notes)
    for note, message in zip(notes, caplog.messages, strict=True):
        assert note in message
    assert {len(row) for row in truncated_rows(found)} == {64}


def test_rows_need_two_tokens() -> None:
    settings = Evaluate(text=str(DEMO / "calibration.jsonl"))
    with breaks(rules.SHORT_CONTEXT, "2"):
        read_rows(
            settings,
            DEMO / "model",
            longest=2,
            vocabulary=384,
            trust_tokenizer=False,
            shows_notes=True,
        )


@pytest.mark.parametrize(
    ("longest", "given", "batched"),
    [
        (513, {}, None),
        (8193, {}, 2048),
        (8193, {"max_num_seqs": 4096}, 4096),
        (8193, {"max_num_batched_tokens": 512}, 512),
        (8193, {"enable_chunked_prefill": False}, None),
    ],
)
def test_long_rows_are_computed_in_parts(
    longest: int, given: EngineArguments, batched: int | None
) -> None:
    arguments = arguments_for_text(given, longest)
    assert arguments.get("max_num_batched_tokens") == batched
    assert {name: arguments[name] for name in given} == given
