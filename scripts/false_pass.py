"""Count how often a verdict is PASS although the true loss equals the margin.

    PYTHONPATH=. .venv/bin/python scripts/false_pass.py [CASE]... [--trials 300]

Each trial draws documents, writes the results of both models, and calls `decide` with alpha 0.05.
The true loss is exactly the margin, so at most 5 % of the verdicts may be PASS. With 300 trials, a
test with this error has at most 24 PASS in 99 of 100 simulations. The script prints a table, and
ends with an error if a case has more. All random numbers have fixed seeds.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from vexport.judge.verdict import decide
from vexport.records import Json
from vexport.records.margin import MarginValue

ALPHA = 0.05
_STAMP = "2026-11-20T21-08-58.768538"
Noise = np.random.Generator
Scores = Iterator[tuple[Json, Json]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A simulated task: its draws, its margin, and the metric of lm-eval for a whole corpus."""

    title: str
    draw: Callable[[Noise], Scores]
    margin: MarginValue
    seeds: int = 1
    metric: str = ""


def binary(documents: int, right: float, loses: float, gains: float) -> Callable[[Noise], Scores]:
    """Return a draw of scores of 0 and 1. `loses` and `gains` are shares of all documents."""

    def draw(noise: Noise) -> Scores:
        old = noise.random(documents) < right
        share = np.where(old, loses / right, gains / (1 - right))
        is_changed = noise.random(documents) < share
        for before, changed in zip(old.tolist(), is_changed.tolist(), strict=True):
            yield int(before), int(before != changed)

    return draw


def sampled(noise: Noise) -> Scores:
    """Yield 4 responses to each of 300 documents, which differ in difficulty. The loss is 2 points.

    Both models have probabilities of their own to answer a document correctly.
    """
    level = noise.beta(2, 1, 300)
    moved = np.clip(level + noise.normal(0, 0.05, 300) * np.minimum(level, 1 - level), 0, 1)
    lower = moved * (1 - 0.02 / (2 / 3))
    for old, new in zip(level, lower, strict=True):
        pairs = noise.random((4, 2)) < [old, new]
        yield from ((int(before), int(after)) for before, after in pairs.tolist())


def graded(noise: Noise) -> Scores:
    """Yield scores between 0 and 1, with a loss of 2 points.

    The mean score is 2/3. Two in ten get worse, and one gets better. The losses have the mean
    0.2 * 0.2 * 2/3, and the gains 0.1 * 0.2 * 1/3.
    """
    old = noise.beta(4, 2, 300)
    kind = noise.random(300)
    size = noise.uniform(0, 0.4, 300)
    new = old - np.where(kind < 0.2, old * size, 0.0)
    new = new + np.where(kind > 0.9, (1 - old) * size, 0.0)
    yield from zip(old.tolist(), new.tolist(), strict=True)


def skewed(noise: Noise) -> Scores:
    """Yield scores without an upper limit, such as ratings, with a loss of 1 %."""
    old = np.exp(noise.normal(0, 1, 200))
    new = old * (0.99 + noise.normal(0, 0.02, 200))
    yield from zip(old.tolist(), new.tolist(), strict=True)


def pages(noise: Noise) -> Scores:
    """Yield log-likelihoods and numbers of words. The perplexity rises by 1 %."""
    words = 1 + np.exp(noise.normal(5, 1, 200)).astype(int)
    old = -words * (3 + noise.normal(0, 0.4, 200))
    new = old - words * (math.log1p(0.01) + noise.normal(0, 0.03, 200))
    rows = zip(old.tolist(), new.tolist(), words.tolist(), strict=True)
    yield from (([before, many], [after, many]) for before, after, many in rows)


def labels(noise: Noise) -> Scores:
    """Yield correct and chosen labels. The F1 falls from 0.85 to 0.8075, by 5 %.

    40 % of the labels are positive. The baseline finds 85 % of them, and has 10 % false positives.
    """
    recall = 0.8075 * 0.46 / (0.8 - 0.8075 * 0.4)
    gold = noise.random(400) < 0.4
    old = noise.random(400) < np.where(gold, 0.85, 0.1)
    new = old & (~gold | (noise.random(400) < recall / 0.85))
    rows = zip(gold.tolist(), old.tolist(), new.tolist(), strict=True)
    for right, before, after in rows:
        sides: tuple[list[Json], list[Json]] = ([int(right), int(before)], [int(right), int(after)])
        yield sides


CASES: Mapping[str, Case] = {
    "binary": Case(
        title="scores of 0 and 1, 400 documents, 6 % change",
        draw=binary(400, 0.8, 0.04, 0.02),
        margin=0.02,
    ),
    "binary, few changes": Case(
        title="scores of 0 and 1, 400 documents, 3 % change",
        draw=binary(400, 0.95, 0.025, 0.005),
        margin=0.02,
    ),
    "seeds": Case(
        title="4 responses to each of 300 documents",
        draw=sampled,
        margin=0.02,
        seeds=4,
    ),
    "float": Case(
        title="scores between 0 and 1, 300 documents",
        draw=graded,
        margin=0.02,
    ),
    "float, relative margin": Case(
        title="scores without a limit, 200 documents",
        draw=skewed,
        margin="1%",
    ),
    "word_perplexity": Case(
        title="`word_perplexity`, 200 documents",
        draw=pages,
        margin="1%",
        metric="word_perplexity",
    ),
    "f1": Case(
        title="`f1`, 400 documents",
        draw=labels,
        margin="5%",
        metric="f1",
    ),
}


def write(folder: Path, case: Case, values: list[Json]) -> Path:
    """Write one side's results: JSON lines, or lm-eval's files for a metric of a whole corpus."""
    folder.mkdir()
    if not case.metric:
        rows: list[dict[str, Json]] = [
            {
                "task": "held",
                "id": number // case.seeds,
                "seed": number % case.seeds,
                "score": value,
                "higher_is_better": True,
            }
            for number, value in enumerate(values)
        ]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return folder
    lines = []
    for number, value in enumerate(values):
        row = {"doc_id": number, "filter": "none", "target": "", "arguments": [[str(number), {}]]}
        row |= {"resps": [[""]], "filtered_resps": [""], "metrics": [case.metric]}
        row |= dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), str(number))
        lines.append(json.dumps({**row, case.metric: value}))
    (folder / f"samples_held_{_STAMP}.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "results": {"held": {}},
        "configs": {"held": {"output_type": "loglikelihood_rolling"}},
        "higher_is_better": {"held": {case.metric: case.metric == "f1"}},
    }
    (folder / f"results_{_STAMP}.json").write_text(json.dumps(content))
    return folder


def outcomes(case: Case, trials: int) -> Counter[str]:
    """Return the number of each outcome."""
    found = Counter[str]()
    for trial in range(trials):
        pairs = [*case.draw(np.random.default_rng(trial))]
        with tempfile.TemporaryDirectory() as folder:
            sides = [
                write(Path(folder) / name, case, [pair[side] for pair in pairs])
                for side, name in enumerate(("base", "new"))
            ]
            verdict = decide(sides[0], sides[1], margin=case.margin, alpha=ALPHA)
        found[verdict.outcome] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--trials", type=int, default=300)
    given = parser.parse_args()
    most = int(stats.binom.ppf(0.99, given.trials, ALPHA))
    print("| task | margin | PASS | FAIL |", "|---|---|---|---|", sep="\n", flush=True)
    is_wrong = False
    for name in given.cases or CASES:
        start = time.monotonic()
        case = CASES[name]
        found = outcomes(case, given.trials)
        margin = str(case.margin).replace("%", " %")
        if isinstance(case.margin, float):
            margin = f"{100 * case.margin:.0f} points"
        print(f"| {case.title} | {margin} | {found['PASS']} | {found['FAIL']} |", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if found["PASS"] > most:
            print(f"{name}: at most {most} of {given.trials} may be PASS", file=sys.stderr)
            is_wrong = True
    sys.exit(int(is_wrong))


if __name__ == "__main__":
    main()
