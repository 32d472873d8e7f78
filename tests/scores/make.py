"""Additions as lm-eval tasks, and lm-eval's output folders for them."""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from vexport.engine.session import Worker
from vexport.judge.statistics import tango_statistic
from vexport.records import silent

SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: additions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{a}} + {{b}} ="
doc_to_target: "{{sum}}"
generation_kwargs: {until: ["."], max_gen_toks: 2, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: additions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{a}} + {{b}} ="
doc_to_choice: "{{[sum|string, 'none of them', '0']}}"
doc_to_target: 0
metric_list:
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
NEAR = SUMS.replace("task: sums", "task: near").replace(
    "metric_list: [{metric: exact_match",
    "process_results: !function score.near\nmetric_list: [{metric: nearness",
)
SCORE = """
def near(doc, results):
    return {"nearness": 1 / (1 + abs(int(results[0]) - doc["sum"]))}
"""


def make_tasks(folder: Path, documents: int) -> list[str]:
    """Write three tasks over the same additions, and return their files.

    `sums` generates, `choices` is multiple choice, and Python code grades the answers of `near`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"a": i % 20, "b": i // 20, "sum": i % 20 + i // 20} for i in range(documents)]
    (folder / "additions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(SCORE)
    for name, text in {"sums": SUMS, "choices": CHOICES, "near": NEAR}.items():
        (folder / f"{name}.yaml").write_text(text)
    return [str(folder / f"{name}.yaml") for name in ("sums", "choices", "near")]


def make_group(folder: Path, subjects: int, documents: int) -> str:
    """Write a group of `subjects` tasks, each with different additions, that lm-eval aggregates."""
    folder.mkdir(parents=True, exist_ok=True)
    for subject in range(subjects):
        rows = [{"a": i, "b": subject, "sum": i + subject} for i in range(documents)]
        (folder / f"additions{subject}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        text = CHOICES.replace("additions.jsonl", f"additions{subject}.jsonl")
        (folder / f"subject{subject}.yaml").write_text(
            text.replace("task: choices", f"task: subject{subject}")
        )
    members = "".join(f"  - subject{subject}\n" for subject in range(subjects))
    metrics = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    group = folder / "subjects.yaml"
    group.write_text(f"group: subjects\ntask:\n{members}{metrics}")
    return str(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Tasks for lm-eval, and the document ids to answer wrong in each output folder."""

    tasks: tuple[str, ...]
    wrong: dict[str, tuple[int, ...]]


def results_file(folder: Path) -> Path:
    (file,) = folder.rglob("results_*.json")
    return file


def samples_file(folder: Path, task: str = "sums") -> Path:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return file


def edit_results(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a run's results file."""
    file = results_file(folder)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_sample(folder: Path, line: int, **values: object) -> None:
    """Replace values of one document in the samples of `sums`."""
    file = samples_file(folder)
    lines = file.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | values)
    file.write_text("\n".join(lines) + "\n")


def run_lm_eval(
    tasks: Sequence[str],
    runs: Mapping[Path, Sequence[int]],
    module: str = "tests.scores.adder",
) -> None:
    """Evaluate a model once for each output folder, with wrong answers to the given documents.

    lm-eval runs in a separate process, because its imports emit warnings.
    """
    folder = next(iter(runs)).parent
    Worker(
        module=module,
        request=Runs(
            tasks=tuple(tasks), wrong={str(run): tuple(wrong) for run, wrong in runs.items()}
        ),
        kind=Runs,
        where="lm-eval",
        log=folder / "lm_eval.log",
        timeout=600,
    ).run(silent)


def exact_power(documents: int, disagreement: float, margin: float, alpha: float = 0.05) -> float:
    """Compute the exact probability of PASS with scipy alone.

    The true difference is zero, and the share `disagreement` of the answers changes.
    """
    critical, power = float(stats.norm.isf(alpha)), 0.0
    low, high = stats.binom.interval(1 - 1e-6, documents, disagreement)
    for changed in range(int(low), int(high) + 1):

        def statistic(wins: int, changed: int = changed) -> float:
            return tango_statistic(wins, changed - wins, documents, -margin)

        least = bisect_right(
            range(changed + 1), critical, key=statistic
        )  # fewest wins that pass: the statistic grows with the wins
        chance = stats.binom.pmf(changed, documents, disagreement)
        power += float(chance * stats.binom.sf(least - 1, changed, 0.5))
    return power
