"""Results of lighteval, EvalScope and plain JSON lines, next to lm-eval's.

The files in `harness_files` were written by lighteval's and EvalScope's own classes.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import Ran, vexport
from tests.scores.harness_files.answers import DOCUMENTS, SEEDS, score
from tests.texts import assert_contains
from vexport.inference.added_keys import SEED

FILES = Path(__file__).parent / "harness_files"
Scores = Mapping[tuple[int, int], int]
HASHES = ("doc_hash", "prompt_hash", "target_hash")


def scores_of(model: str) -> dict[tuple[int, int], int]:
    """Return the scores that the recorded files contain."""
    return {
        (document, seed): score(model, document, seed)
        for document in range(DOCUMENTS)
        for seed in range(SEEDS)
    }


def many(lost: int, won: int) -> dict[str, dict[tuple[int, int], int]]:
    """Return two models' scores on 500 documents with 4 seeds."""
    keys = [(document, seed) for document in range(500) for seed in range(4)]
    base = {key: int(key[0] % 10 > 0) for key in keys}
    new = dict(base)
    right = [key for key in keys if base[key]]
    wrong = [key for key in keys if not base[key]]
    for key in right[: 7 * lost : 7]:
        new[key] = 0
    for key in wrong[: 3 * won : 3]:
        new[key] = 1
    return {"base": base, "new": new}


def write_json_lines(folder: Path, scores: Scores) -> Path:
    rows = [
        {"task": "sums", "id": document, "seed": seed, "score": value, "answer": str(value)}
        for (document, seed), value in scores.items()
    ]
    return write_lines(folder / "scores.jsonl", rows)


def write_reviews(folder: Path, scores: Scores) -> Path:
    """Write EvalScope's reviews, in another order."""
    rows: list[dict[str, Any]] = []
    for number, ((document, seed), value) in enumerate(reversed(list(scores.items()))):
        rated = {"value": {"acc": float(value)}, "status": "success", "prediction": str(value)}
        sample = {"score": rated, "group_id": document, "generation_index": seed}
        rows.append({"index": number, "messages": [], "sample_score": sample})
    write_lines(folder / "reviews" / "m" / "sums_default.jsonl", rows)
    return folder


def write_lm_eval(folder: Path, scores: Scores) -> Path:
    stamp = "2026-11-27T10-00-00.000000"
    folder.mkdir(parents=True)
    content = {
        "results": {"sums": {}},
        "configs": {"sums": {"output_type": "generate_until"}},
        "higher_is_better": {"sums": {"exact_match": True}},
    }
    (folder / f"results_{stamp}.json").write_text(json.dumps(content))
    rows = []
    for (document, seed), value in scores.items():
        sample = {"doc_id": document, SEED: seed, "filter": "none", "target": "1"}
        answers = {"arguments": [["1 + 1", {}]], "resps": [[str(value)]]}
        kept = {"filtered_resps": [str(value)], "metrics": ["exact_match"], "exact_match": value}
        rows.append({**sample, **answers, **kept, **dict.fromkeys(HASHES, str(document))})
    write_lines(folder / f"samples_sums_{stamp}.jsonl", rows)
    return folder


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


WRITERS: Mapping[str, Callable[[Path, Scores], Path]] = {
    "json-lines": write_json_lines,
    "evalscope": write_reviews,
    "lm-eval": write_lm_eval,
}


def verdict(baseline: Path, candidate: Path, *options: object) -> Ran:
    return vexport("verdict", baseline, candidate, "--format", "json", *options)


def interval(ran: Ran) -> tuple[float, float, float]:
    (task,) = json.loads(ran.stdout)["tasks"]
    return task["difference"], task["low"], task["high"]


def test_recorded_files_agree(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = {
        name: interval(verdict(FILES / name / "base", FILES / name / "new"))
        for name in ("lighteval", "evalscope")
    }
    for name, write in WRITERS.items():
        sides = [write(tmp_path / name / model, scores_of(model)) for model in ("base", "new")]
        found[f"written {name}"] = interval(verdict(*sides))
    for bounds in found.values():
        assert bounds == pytest.approx(found["lighteval"], abs=1e-12)
    assert found["lighteval"][0] == pytest.approx(-2 / 80)


def test_many_seeds(tmp_path: Path) -> None:
    models = many(lost=20, won=8)
    found = []
    for name, write in WRITERS.items():
        base, new = (write(tmp_path / name / side, models[side]) for side in ("base", "new"))
        ran = verdict(base, new)
        (task,) = json.loads(ran.stdout)["tasks"]
        assert (task["documents"], task["seeds"]) == (500, 4)
        assert (task["changes"]["right_to_wrong"], task["changes"]["wrong_to_right"]) == (20, 8)
        found.append(interval(ran))
        assert verdict(base, base).code == 0
    for bounds in found[1:]:
        assert bounds == pytest.approx(found[0], abs=1e-12)


def test_seeds_that_would_decide(tmp_path: Path) -> None:
    keys = [(document, seed) for document in range(30) for seed in range(8)]
    base = {key: int(sum(key) % 5 > 0) for key in keys}
    new = {key: int((key[0] + 3 * key[1]) % 5 > 0) for key in keys}
    ran = verdict(
        write_json_lines(tmp_path / "base", base), write_json_lines(tmp_path / "new", new)
    )
    assert ran.code == 3
    assert json.loads(ran.stdout)["tasks"][0]["needed"]["documents"] > 30
    assert "seeds" in json.loads(ran.stdout)["reason"]


def test_names_and_unordered_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"task": "t", "id": f"q{number}", "score": number % 3 / 2} for number in range(60)
    ]
    base = write_lines(tmp_path / "base.jsonl", rows)
    new = write_lines(tmp_path / "new.jsonl", rows[::-1])
    ran = verdict(base, new, "--margin", "0.2")
    assert (ran.code, interval(ran)[0]) == (0, 0.0)


def refused(baseline: Path, candidate: Path) -> str:
    ran = verdict(baseline, candidate)
    assert ran.code == 2
    assert len(ran.errors) == 1, ran.stderr
    return ran.errors[0]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"task": "sums", "id": number, "score": 1} for number in range(20)]


def test_missing_and_doubled_ids(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    base = write_lines(tmp_path / "base.jsonl", rows)
    missing = write_lines(tmp_path / "missing.jsonl", rows[:7] + rows[8:])
    assert "no document 7" in refused(base, missing)
    assert "no document 7" in refused(missing, base)
    doubled = write_lines(tmp_path / "doubled.jsonl", [*rows, rows[3]])
    assert_contains(refused(base, doubled), "doubled.jsonl:21", "document 3 twice")
    other = write_lines(tmp_path / "other.jsonl", [{**row, "task": "more"} for row in rows])
    assert "no task" in refused(base, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": None}, "score of document 4"),
        ({"score": "right"}, "score 'right', need a number"),
        ({"score": float("nan")}, "score nan"),
        ({"id": None}, "id None"),
        ({"seed": -1}, "seed -1"),
        ({"task": 3}, "a row without usable task"),
    ],
)
def test_wrong_rows(
    change: dict[str, Any], message: str, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    base = write_lines(tmp_path / "base.jsonl", rows)
    new = write_lines(tmp_path / "new.jsonl", [*rows[:4], {**rows[4], **change}, *rows[5:]])
    assert message in refused(base, new)


def test_score_without_success_is_missing(tmp_path: Path) -> None:
    base = write_reviews(tmp_path / "base", scores_of("base"))
    new = write_reviews(tmp_path / "new", scores_of("base"))
    file = new / "reviews" / "m" / "sums_default.jsonl"
    reviews = [json.loads(line) for line in file.read_text().splitlines()]
    reviews[5]["sample_score"]["score"] |= {"status": "parse_error", "value": {}}
    write_lines(file, reviews)
    assert "status parse_error" in refused(base, new)
    for review in reviews:
        if review["sample_score"]["group_id"] == reviews[5]["sample_score"]["group_id"]:
            review["sample_score"]["score"] |= {"status": "parse_error", "value": {}}
    write_lines(file, reviews)
    assert "status parse_error" in refused(base, new)
    # The same document is missing in both.
    ran = verdict(new, new, "--margin", "0.2")
    assert json.loads(ran.stdout)["tasks"][0]["documents"] == DOCUMENTS - 1


def test_other_metrics_and_harnesses(tmp_path: Path) -> None:
    reviews = FILES / "evalscope" / "base"
    other = tmp_path / "other"
    shutil.copytree(reviews, other)
    (file,) = other.rglob("*.jsonl")
    file.write_text(file.read_text().replace('"acc"', '"rouge"'))
    assert re.search(
        r"\brouge\b.* baseline .*\bacc\b.* \[pairs/no-score\]", refused(reviews, other)
    )
    lines = write_json_lines(tmp_path / "lines", scores_of("base"))
    message = refused(reviews, lines)
    assert "JSON lines" in message
    assert "EvalScope" in message
    pytest.importorskip("pyarrow")
    details = FILES / "lighteval" / "base"
    assert "lighteval" in refused(details, reviews)
    shutil.copytree(details / "details", other / "details")
    assert "lighteval and EvalScope" in refused(reviews, other)


def test_broken_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "details_t|0_2026-11-27T10-00-00.0.parquet").write_text("no parquet")
    assert "lighteval's details" in refused(FILES / "lighteval" / "base", tmp_path)


def test_cut_answers_count(tmp_path: Path) -> None:
    rows = [
        {"task": "t", "id": number, "score": int(number % 4 > 0), "answer": "7"}
        for number in range(400)
    ]
    base = write_lines(tmp_path / "base.jsonl", rows)
    for row in rows:
        row["finish_reason"] = "length" if row["score"] == 0 else "stop"
    new = write_lines(tmp_path / "new.jsonl", rows)
    ran = verdict(base, new)
    assert ran.code == 3
    assert json.loads(ran.stdout)["tasks"][0]["answers"]["candidate"]["cut"] == 100
