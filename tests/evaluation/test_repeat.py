"""A model against itself: no verdict from a non-deterministic engine."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from vexport.errors import EnvironmentFault
from vexport.evaluation.results import Repeated, compare_rows, read_results, write_repeated
from vexport.evaluation.verdict import decide

Rows = Mapping[str, Sequence[Mapping[str, object]]]


def rows(scores: Sequence[float], prompt: str = "p") -> list[Mapping[str, object]]:
    return [
        {
            "doc_id": number,
            "filter": "none",
            "prompt_hash": f"{prompt}{number}",
            "metrics": ["acc"],
            "acc": acc,
        }
        for number, acc in enumerate(scores)
    ]


def test_changed_answers_are_counted_by_document() -> None:
    first = {"one": rows([1, 1, 0, 0]), "two": rows([1, 0])}
    again = {"one": rows([1, 0, 0, 1]), "two": rows([1])}
    assert compare_rows(first, again) == Repeated(documents=5, changed=2)


def test_another_prompt_and_graded_scores_are_not_compared() -> None:
    assert compare_rows({"one": rows([1])}, {"one": rows([0], prompt="q")}) == Repeated(
        documents=0, changed=0
    )
    assert compare_rows({"one": rows([0.51])}, {"one": rows([0.52])}).changed == 0


@pytest.mark.parametrize(
    ("changed", "documents", "sampled"),
    [(0, 200, False), (3, 200, False), (0, 0, False), (1, 20, False), (40, 200, True)],
)
def test_what_is_about_zero_or_sampled_is_told_in_the_method(
    lm_eval_runs: Path, tmp_path: Path, changed: int, documents: int, sampled: bool
) -> None:
    shutil.copytree(lm_eval_runs / "baseline", tmp_path / "baseline")
    folder = read_results(tmp_path / "baseline").file.parent
    write_repeated(folder, Repeated(documents=documents, changed=changed, sampled=sampled))
    verdict = decide(tmp_path / "baseline", lm_eval_runs / "twin", margin=0.02, alpha=0.05)
    assert verdict.method.endswith(f"; asked again, {changed} of {documents} answers changed")


def test_a_non_deterministic_engine_exits_with_4(lm_eval_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(lm_eval_runs / "baseline", tmp_path / "baseline")
    write_repeated(read_results(tmp_path / "baseline").file.parent, Repeated(documents=200, changed=4))
    with pytest.raises(EnvironmentFault, match="4 of 200 answers changed when the same model") as caught:
        decide(tmp_path / "baseline", lm_eval_runs / "worse", margin=0.02, alpha=0.05)
    assert caught.value.exit_code == 4
