"""Measure the processor time of `vexport verdict` on large results, and how it grows.

    PYTHONPATH=. .venv/bin/python scripts/bench/verdict.py [KIND]... [--scale SHARE]

Each kind of results is made at half of its size and at its whole size. The script prints a row for
each kind: the processor time for both sizes, and their ratio. It ends with an error if a time is
above 20 s, or if twice the input takes more than 2.3 times as long.

| kind | results |
|---|---|
| `binary` | 300,000 documents with scores of 0 and 1 |
| `float` | 300,000 documents with other scores |
| `corpus` | 300,000 pages for `word_perplexity`, as lm-eval stores them |
| `seeds` | 2 documents with 20,000 sampled responses each |
| `tasks` | 20,000 tasks of one document |
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from measure import timed

from vexport.cli.entry import cli
from vexport.errors import CheckpointFailed, Inconclusive

MOST_SECONDS = 20.0
MOST_RATIO = 2.3
# lm-eval's date in the names of its files.
_STAMP = "2026-11-20T21-08-58.768538"
Rows = Iterator[dict[str, object]]


def binary(count: int, loss: float) -> Rows:
    """Yield scores of 0 and 1. A share `loss` of the responses gets worse."""
    draws = np.random.default_rng(0).random((count, 2))
    for number, (level, change) in enumerate(draws.tolist()):
        score = int(level < 0.7 and change >= loss)
        yield {"task": "held", "id": number, "score": score, "answer": str(score)}


def floats(count: int, loss: float) -> Rows:
    """Yield scores between 0 and 1."""
    draws = np.random.default_rng(0).random((count, 2))
    for number, (level, change) in enumerate(draws.tolist()):
        yield {"task": "held", "id": number, "score": level * (1 - loss * change)}


def seeds(count: int, loss: float) -> Rows:
    """Yield scores of 0 and 1 for two documents with many seeds."""
    for row in binary(2 * count, loss):
        number = int(str(row["id"]))
        yield {**row, "id": number % 2, "seed": number // 2}


def tasks(count: int, loss: float) -> Rows:
    """Yield scores of 0 and 1, each for another task."""
    for row in binary(count, loss):
        yield {**row, "task": f"task {row['id']}", "id": 0}


def pages(count: int, loss: float) -> Rows:
    """Yield samples of lm-eval with log-likelihoods and numbers of words."""
    draws = np.random.default_rng(0).normal(size=(count, 3))
    for number, (length, level, change) in enumerate(draws.tolist()):
        words = 1 + int(math.exp(5 + length))
        value = -words * (3 + 0.3 * level + loss * (1 + change))
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        yield {
            "doc_id": number,
            "doc": {},
            "target": "",
            "arguments": {"gen_args_0": {"arg_0": str(number)}},
            "resps": [[value]],
            "filtered_resps": [value],
            "filter": "none",
            "metrics": ["word_perplexity"],
            "word_perplexity": [value, words],
            **dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), digest),
        }


KINDS: Mapping[str, tuple[Callable[[int, float], Rows], int]] = {
    "binary": (binary, 300_000),
    "float": (floats, 300_000),
    "corpus": (pages, 300_000),
    "seeds": (seeds, 20_000),
    "tasks": (tasks, 20_000),
}


def write(folder: Path, kind: str, count: int, loss: float) -> Path:
    """Write one side, and return the path for `vexport verdict`."""
    make, _ = KINDS[kind]
    folder.mkdir(parents=True)
    name = f"samples_pages_{_STAMP}.jsonl" if kind == "corpus" else "rows.jsonl"
    with (folder / name).open("w") as file:
        for row in make(count, loss):
            file.write(f"{json.dumps(row)}\n")
    if kind == "corpus":
        content = {
            "results": {"pages": {}},
            "configs": {"pages": {"output_type": "loglikelihood_rolling"}},
            "higher_is_better": {"pages": {"word_perplexity": False}},
        }
        (folder / f"results_{_STAMP}.json").write_text(json.dumps(content))
    return folder


def measure(folder: Path, kind: str, count: int) -> float:
    """Return the processor time of `vexport verdict`, in seconds."""
    sides = [write(folder / name, kind, count, loss) for name, loss in (("a", 0.0), ("b", 0.004))]
    return timed(sys.executable, __file__, "--judge", *sides).cpu


def judge(baseline: str, candidate: str) -> None:
    """Print the verdict as `vexport verdict` does, but exit with 0 for each outcome."""
    arguments = ["verdict", baseline, candidate]
    with suppress(Inconclusive, CheckpointFailed):
        cli.main(arguments, standalone_mode=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--judge", nargs=2, metavar="RESULTS", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the documents")
    given = parser.parse_args()
    if given.judge:
        judge(*given.judge)
        return
    is_slow = False
    for kind in given.kinds or KINDS:
        count = int(KINDS[kind][1] * given.scale)
        with tempfile.TemporaryDirectory() as folder:
            half = measure(Path(folder) / "half", kind, count // 2)
            whole = measure(Path(folder) / "whole", kind, count)
        ratio = whole / half
        print(f"{kind:8} {count:9,}  {half:6.1f} s  {whole:6.1f} s  ratio {ratio:.2f}", flush=True)
        is_slow |= whole > MOST_SECONDS or ratio > MOST_RATIO
    sys.exit(int(is_slow))


if __name__ == "__main__":
    main()
