"""Given results that do not match the tasks. They are refused before a model runs."""

from pathlib import Path

import pytest

from tests.texts import assert_raises
from vexport.errors import InputError
from vexport.scores.comparable_results import require_comparable_results
from vexport.scores.table import Row, ScoreTable, TaskTable

FILE = Path("results.json")


def table(task: str, documents: int, full_size: int) -> TaskTable:
    rows = [
        Row(filter="none", doc_id=number, scores={}, hashes=(), shown_text="", compared_text=None)
        for number in range(documents)
    ]
    return TaskTable(task=task, file=FILE, rows={row.key: row for row in rows}, full_size=full_size)


GIVEN = ScoreTable(
    file=FILE,
    tasks={
        "sums": table("sums", 100, 200),
        "part0": table("part0", 50, 50),
        "part1": table("part1", 50, 50),
    },
    names=(),
    members={"parts": ("part0", "part1")},
)


def test_matching_tasks_are_accepted() -> None:
    require_comparable_results(GIVEN, ["sums", "parts"], [], 100)
    require_comparable_results(GIVEN, ["sums", "part0", "part1"], ["sums"], 100)
    require_comparable_results(GIVEN, ["a_tag"], [], 100)


@pytest.mark.parametrize(
    ("names", "exact", "limit", "parts"),
    [
        (["sums"], [], 100, ["task part0", "--task sums,part0,part1"]),
        (["sums", "parts", "more"], ["more"], 100, ["without the task more"]),
        (["sums", "parts"], [], None, ["task sums: got 100", "--limit 100"]),
        (["sums", "parts"], [], 150, ["task sums: got 100"]),
        (["sums", "parts"], [], 20, ["task part0: got 50"]),
        (["sums", "parts"], [], 0.25, ["task sums: got 100"]),
    ],
)
def test_mismatched_tasks_are_refused(
    names: list[str], exact: list[str], limit: float | None, parts: list[str]
) -> None:
    with assert_raises(InputError, *parts):
        require_comparable_results(GIVEN, names, exact, limit)
