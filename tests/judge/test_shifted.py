"""Pairing of documents by content, if two runs number them differently."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.judge.test_verdict import SAMPLE
from vexport.errors import InputError
from vexport.judge.pairs import TaskPair, pair_metrics
from vexport.rules import pairs
from vexport.scores.table import TaskTable

# A score for each document of the baseline.
SCORES = {"a": 1.0, "b": 0.0, "c": 1.0}


def task_table(documents: Mapping[int, str], scores: Mapping[str, float] = SCORES) -> TaskTable:
    """Return the table of a task. `documents` has the content of each document by its id."""
    rows = [
        replace(
            SAMPLE,
            doc_id=number,
            hashes=(content, content, content),
            scores={"acc": scores[content]},
        )
        for number, content in documents.items()
    ]
    return TaskTable(
        task="sums",
        file=Path("samples_sums.jsonl"),
        higher_is_better={"acc": True},
        rows={row.key: row for row in rows},
    )


def single_pair(left: TaskTable, right: TaskTable) -> TaskPair:
    (pair,) = pair_metrics(left, right)
    return pair


def test_shifted_ids_are_paired_by_content() -> None:
    left, right = (
        task_table({0: "a", 1: "b", 2: "c"}),
        task_table({7: "c", 3: "a", 5: "b"}, {**SCORES, "c": 0.0}),
    )
    pair = single_pair(left, right)
    assert [(old.doc_id, new.doc_id) for old, new in pair.documents] == [(0, 0), (1, 1), (2, 2)]
    assert pair.gain.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("ids", [(1, 2, 3), (2, 1, 0), (2, 0, 1)])
def test_duplicates_with_shifted_ids(ids: tuple[int, int, int]) -> None:
    """Two equal documents cannot be paired with certainty if the ids differ."""
    left, right = (
        task_table({0: "a", 1: "a", 2: "b"}),
        task_table(dict(zip(ids, "aab", strict=True))),
    )
    with pytest.raises(InputError) as caught:
        single_pair(left, right)
    assert caught.value.rule in {pairs.OTHER_QUESTION.id, pairs.MISSING_DOCUMENTS.id}


def test_duplicates_with_equal_ids() -> None:
    """If the ids are equal, documents need no pairing by content."""
    left, right = (
        task_table({0: "a", 1: "a", 2: "b"}),
        task_table({0: "a", 1: "a", 2: "b"}, {**SCORES, "b": 1.0}),
    )
    assert single_pair(left, right).gain.tolist() == [0.0, 0.0, 1.0]


def test_different_documents_are_refused() -> None:
    with pytest.raises(InputError, match="document"):
        single_pair(task_table({0: "a", 1: "b"}), task_table({3: "a", 4: "c"}))
