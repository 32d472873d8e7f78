"""Given results that do not match the tasks. They are refused before a model runs."""

from pathlib import Path

import pytest

from tests.texts import assert_raises
from vexport.errors import InputError
from vexport.inference.tasks import require_generating
from vexport.judge.comparable_results import DocumentCounts, require_comparable_results

GIVEN = DocumentCounts(
    file=Path("results.json"),
    documents={"sums": 100, "part0": 50, "part1": 50},
    full_sizes={"sums": 200, "part0": 50, "part1": 50},
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
        (["sums", "parts", "more"], ["more"], 100, ["no task more"]),
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


def test_thinking_needs_generative_tasks(tmp_path: Path) -> None:
    (tmp_path / "choices.yaml").write_text("task: choices\noutput_type: multiple_choice\n")
    (tmp_path / "sums.yaml").write_text("task: sums\noutput_type: generate_until\n")
    require_generating([str(tmp_path / "sums.yaml"), "gsm8k"])
    with assert_raises(InputError, "task choices", "enable_thinking", "multiple_choice"):
        require_generating([str(tmp_path / "sums.yaml"), str(tmp_path / "choices.yaml")])
