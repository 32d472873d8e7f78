"""Pairs of results for `scripts/net.py`, and the calls of vexport that judge them.

The files are written by the tests' own writers: lm-eval's own classes, the recorded files of
lighteval and EvalScope, and writers of single rows. Nothing here starts an engine.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.command import ROOT
from tests.judge.test_corpus_groups import METRICS, make_corpus_group
from tests.judge.test_seeds import with_seeds
from tests.reports import sample
from tests.reports import test_comparison as several
from tests.scores.corpus_tasks import make_corpus_tasks
from tests.scores.make import (
    edit_results,
    edit_sample,
    make_group,
    make_tasks,
    results_file,
    run_lm_eval,
    samples_file,
)
from tests.scores.test_harnesses import FILES, WRITERS, many, scores_of, write_lines
from tests.scores.test_several_files import LOST, RIGHT, write
from vexport.errors import InputError
from vexport.files import to_json
from vexport.inference.tasks import read_tasks
from vexport.judge.accepting import accept_results

Row = dict[str, Any]
# A name, and the arguments of a call. PATHs in it start with the root of the results.
Call = tuple[str, Sequence[object]]
# Pairs that lm-eval itself writes.
LM_EVAL = ("lm-eval", "group", "corpus", "corpora")
STAMP = "2026-11-20T21-08-58.768538"
# Options with which each pair is judged.
SETTINGS = ("", "--margin 0", "--margin 0.2", "--margin 1%", "--alpha 0.2", "--alpha 0.001")
# Further options for a pair, or for pairs that begin with a name.
MORE = {
    "lm-eval": (
        "--task sums",
        "--task sums,near --margin sums=0.3 --margin near=0.1",
        "--gate choices=acc_norm,none --gate near=nearness:higher",
        "--gate near=nearness:lower",
        "--gate sums=exact_match,none --margin 0.01 --alpha 0.01",
        "--margin 50%",
        "--margin nothing=0.1",
        "--task nothing",
        "--gate nothing",
    ),
    "edit": ("--gate acc", "--gate choices=acc_norm"),
    "group": ("--task subjects", "--gate subjects=acc_norm", "--margin subjects=0.3"),
    "corpus": (
        "--task labels,kinds --gate labels=mcc --gate kinds=brier_score --margin 50%",
        "--task pages --margin pages=10% --gate pages=bits_per_byte",
        "--task translation --gate translation=ter --margin 0.5%",
        "--task translation --gate translation=chrf --margin 30%",
    ),
    "corpora": ("--gate pages_group=bits_per_byte --gate labels_group=mcc",),
    "files": ("--task a,b", "--margin a=0.4"),
    "rows": ("--gate score:lower --margin 5%", "--gate t=score --margin t=0.05"),
    "evalscope": ("--gate acc:lower",),
    "reviews": ("--gate WER:higher", "--gate toxicity:lower --margin 10%"),
}
# Pairs that `eval` compares, with the tasks that their results are of. lm-eval resolves the tasks.
EVALUATED = {
    "lm-eval": "lm-eval/tasks/*.yaml",
    "doubtful": "lm-eval/tasks/*.yaml",
    "edit-cut": "lm-eval/tasks/*.yaml",
    "edit-model-args": "lm-eval/tasks/*.yaml",
    "seeds-8": "lm-eval/tasks/*.yaml",
    "group": "group/tasks/subjects.yaml",
    "corpus": "corpus/tasks/*.yaml",
}


def lm_eval_results(root: Path) -> None:
    """Write results with lm-eval itself: three tasks, groups, and metrics of a whole corpus."""
    os.environ["PYTHONPATH"] = str(ROOT)  # its worker imports the tests' models
    plain, group, corpus, corpora = map(root.joinpath, LM_EVAL)
    tasks = make_tasks(plain / "tasks", 400)
    wrong = {"base": range(5), "doubtful": range(1, 12), "worse": range(3, 60)}
    _run(plain, tasks, wrong)
    _run(group, [make_group(group / "tasks", 12, 30)], {"base": (0,), "worse": range(5)})
    lost = {"base": (), "worse": range(0, 120, 3)}
    _run(corpus, make_corpus_tasks(corpus / "tasks", 120), lost, "translator")
    corpora.mkdir()
    groups = [make_corpus_group(corpora, kind, (20, 60, 40), f"{kind}_group") for kind in METRICS]
    _run(corpora, groups, lost, "translator")


def _run(
    folder: Path, tasks: list[str], wrong: Mapping[str, Sequence[int]], model: str = "adder"
) -> None:
    resolved = read_tasks(tasks, trust_remote_code=True).write(folder / "resolved")
    runs = {folder / name: ids for name, ids in wrong.items()}
    run_lm_eval(resolved, runs, f"tests.scores.{model}")
    for run in runs:
        for file in [each for each in run.rglob("*") if each.is_file()]:
            file.rename(file.with_name(re.sub(r"20\d\d-\d\d-\d\dT[\d.-]+\d", STAMP, file.name)))


def edited_results(root: Path) -> None:
    """Change copies of lm-eval's results: prompts, settings, responses, seeds and documents."""
    edits: Mapping[str, Callable[[Path], object]] = {
        "shots": lambda run: edit_results(run, lambda found: found["n-shot"].update(sums=3)),
        "template": lambda run: edit_results(
            run, lambda found: found.update(chat_template="{{ x }}", chat_template_sha="ab12" * 16)
        ),
        "model-args": lambda run: edit_results(
            run, lambda found: found["config"].update(model_args={"add_bos_token": True})
        ),
        "lm-eval-version": lambda run: edit_results(
            run, lambda found: found.update(lm_eval_version="0.4.1")
        ),
        "cut": partial(
            _edit_many, 120, finish_reason=[["length"]], **answered("I will"), exact_match=0.0
        ),
        "empty": partial(_edit_many, 30, **answered(""), exact_match=0.0),
        "other-question": partial(_edit_many, 1, doc_hash="other"),
        "other-prompt": partial(_edit_many, 400, prompt_hash="other"),
        "no-responses": lambda run: samples_file(run).unlink(),
        "no-directions": lambda run: edit_results(run, lambda found: found.pop("higher_is_better")),
        "repeated": repeat,
    }
    source = root / "lm-eval"
    for name, edit in edits.items():
        for side, given in (("base", "base"), ("new", "doubtful")):
            shutil.copytree(source / given, root / f"edit-{name}" / side)
        edit(root / f"edit-{name}" / "new")
    for flips in (0, 8):
        (root / f"seeds-{flips}").mkdir()
        with_seeds(source / "base", root / f"seeds-{flips}" / "base", 0)
        with_seeds(source / "base", root / f"seeds-{flips}" / "new", flips)


def answered(text: str) -> Row:
    return {"resps": [[text]], "filtered_resps": [text]}


def repeat(run: Path) -> None:
    """Add the result of a second run of the same model, which gave other responses."""
    file = results_file(run).with_name("repeat.json")
    file.write_text('{"documents": 200, "changed": 9}')


def _edit_many(number: int, run: Path, **values: object) -> None:
    for line in range(number):
        edit_sample(run, line, **values)


def harness_results(root: Path) -> None:
    """Write the same responses as files of each harness, and copy recorded files."""
    few = {model: scores_of(model) for model in ("base", "new")}
    for name, writer in WRITERS.items():
        for kind, sides in {"few": few, "lost": many(20, 8), "won": many(2, 30)}.items():
            for side, scores in sides.items():
                writer(root / f"{name}-{kind}" / side, scores)
    for name in ("lighteval", "evalscope"):
        shutil.copytree(FILES / name, root / name)
    for task in ("a", "b", "c"):
        write(root / "files" / "base", task, RIGHT, day=ord(task) - 96)
        write(root / "files" / "new", task, LOST if task == "a" else RIGHT, day=ord(task) - 96)
    write(root / "replaced" / "base", "a", RIGHT)
    write(root / "replaced" / "new", "a", LOST)
    for side in ("base", "new"):
        write(root / "replaced" / side, "a", RIGHT[:100], day=2)
    write(root / "one-side" / "base", "a", RIGHT)
    write(root / "one-side" / "new", "a", RIGHT, add_bos_token="True")


def row_results(root: Path) -> None:
    """Write JSON lines and reviews: graded, lost, clustered, doubtful and unusable scores."""
    right: list[Row] = [
        {"task": "t", "id": each, "score": int(each % 3 > 0)} for each in range(400)
    ]
    lost = [{**row, "score": int(row["id"] % 3 > 1)} for row in right]
    graded = [{**row, "score": row["id"] % 7 / 7} for row in right]
    low = [{**row, "score": max(0.0, row["score"] - 0.02 * (row["id"] % 2))} for row in graded]
    none_right = [{**row, "score": 0} for row in right]
    rows: Mapping[str, tuple[list[Row], list[Row]]] = {
        "equal": (right, right),
        "lost-third": (right, lost),
        "won-third": (lost, right),
        "graded": (graded, low),
        "unordered": (graded, low[::-1]),
        "losses-lower": _scaled(graded, low, higher_is_better=False),
        "losses-assumed": _scaled(graded, low),
        "named-loss": _scaled(graded, low, metric="perplexity"),
        "no-room": ([{**row, "score": 0.005 * (row["id"] % 5)} for row in right], none_right),
        "tiny": (right[:3], lost[:3]),
        "one": (right[:1], right[:1]),
        "same-answer": _with(right, right, answer="I cannot help with that."),
        "cut": (right, [{**row, "answer": "so", "finish_reason": "length"} for row in lost]),
        "empty": (right, [{**row, "answer": ""} for row in lost]),
        "ended": _with(right, lost, answer="4", finish_reason="stop"),
        "seeds": (_seeds(4, 0), _seeds(4, 1)),
        "seeds-one-side": (_seeds(4, 0), _seeds(1, 0)),
        "two-tasks": ([*right, *_named(graded, "u")], [*lost, *_named(low, "u")]),
        "nine-tasks": (_tasks(right, right), _tasks(right, lost)),
        "missing": (right, right[:-1]),
        "other-task": (right, _named(right, "u")),
        "doubled": (right, [*right, right[3]]),
        "wrong-score": (right, [*right[:-1], {**right[-1], "score": "right"}]),
        "huge": (right, [*right[:-1], {**right[-1], "score": 1e49}]),
        "none": (right, []),
    }
    for name, sides in rows.items():
        for side, content in zip(("base", "new"), sides, strict=True):
            write_lines(root / f"rows-{name}" / f"{side}.jsonl", content)
    metrics = {"WER": (0.12, 0.32), "toxicity": (0.2, 0.4), "Pass@1": (0.5, 0.1)}
    for metric, levels in metrics.items():
        for side, level in zip(("base", "new"), levels, strict=True):
            content = [_review(metric, each, level + (each % 5) / 100) for each in range(300)]
            write_lines(root / f"reviews-{metric}" / side / "reviews/m/speech.jsonl", content)
    for side in ("base", "new"):
        (root / "empty-folder" / side).mkdir(parents=True)


def _scaled(base: list[Row], new: list[Row], **fields: object) -> tuple[list[Row], list[Row]]:
    """Return scores above 1, such as losses."""
    old, changed = ([{**row, "score": 2 + row["score"]} for row in rows] for rows in (base, new))
    return _with(old, changed, **fields)


def _with(base: list[Row], new: list[Row], **fields: object) -> tuple[list[Row], list[Row]]:
    return [{**row, **fields} for row in base], [{**row, **fields} for row in new]


def _named(rows: list[Row], task: str) -> list[Row]:
    return [{**row, "task": task} for row in rows]


def _tasks(most: list[Row], last: list[Row]) -> list[Row]:
    parts = [_named(most, f"task{number}") for number in range(8)] + [_named(last, "task8")]
    return [row for part in parts for row in part]


def _seeds(seeds: int, shift: int) -> list[Row]:
    """Return several scores of each document. With a shift, they depend on the seed."""
    return [
        {"task": "t", "id": each, "seed": seed, "score": int((each + shift * seed) % 5 > 0)}
        for each in range(60)
        for seed in range(seeds)
    ]


def _review(metric: str, number: int, value: float) -> Row:
    rated = {"score": {"value": {metric: value}}, "group_id": number}
    return {"index": number, "messages": [], "sample_score": rated}


def side(folder: Path, name: str) -> Path:
    """Return the folder or file of one side of a pair."""
    return folder / name if (folder / name).exists() else folder / f"{name}.jsonl"


def write_pairs(root: Path) -> list[Path]:
    """Write all results, and return the folder of each pair."""
    lm_eval_results(root)
    edited_results(root)
    harness_results(root)
    row_results(root)
    for name in LM_EVAL:
        (root / name / "worse").rename(root / name / "new")
    shutil.copytree(root / "lm-eval" / "base", root / "doubtful" / "base")
    shutil.copytree(root / "lm-eval" / "doubtful", root / "doubtful" / "new")
    return sorted(
        folder
        for folder in root.iterdir()
        if side(folder, "base").exists() and side(folder, "new").exists()
    )


def verdicts(pairs: Sequence[Path]) -> Iterator[Call]:
    """Yield calls of `verdict` with all settings."""
    for pair in pairs:
        sides = side(pair, "base"), side(pair, "new")
        more = MORE.get(pair.name, MORE.get(pair.name.partition("-")[0], ()))
        for options in (*SETTINGS, *more):
            yield f"{pair.name} {options}", ("verdict", *sides, *options.split())
        yield f"{pair.name} back", ("verdict", *sides[::-1])


def accepted(pairs: Sequence[Path]) -> Iterator[Call]:
    """Accept the results of each pair, and yield calls that compare with the accepted baseline."""
    for pair in pairs:
        file = pair / "accepted.json"
        try:
            accept_results(side(pair, "base"), file, {})
        except InputError as error:
            file.write_text(str(error))
        for options in ("", "--margin 0.2"):
            words = ("verdict", file, side(pair, "new"), *options.split())
            yield f"{pair.name} accepted {options}", words


def evaluations(root: Path) -> Iterator[Call]:
    """Yield calls of `eval` and `report` on results. No model runs."""
    trust = "--trust-remote-code"
    for name, pattern in EVALUATED.items():
        base, new = root / name / "base", root / name / "new"
        tasks = [word for file in sorted(root.glob(pattern)) for word in ("--task", file)]
        file, first, *outs = (root / name / part for part in ("own.json", "1", "2", "3", "4"))
        compared = ("eval", new, "--baseline", base, trust, *tasks, "--no-attribution")
        yield f"{name} eval", (*compared, "--output-dir", outs[0])
        kept = ("eval", base, trust, *tasks, "--accept", file, "--output-dir", first)
        yield f"{name} eval accepts", kept
        against = ("eval", new, "--against", file, trust, "--no-attribution")
        yield f"{name} against", (*against, "--output-dir", outs[1])
        yield f"{name} against margin", (*against, "--margin", "0.3", "--output-dir", outs[2])
        yield f"{name} report", ("report", outs[0])
        yield f"{name} reports", ("report", *outs)
        yield f"{name} history", ("report", file, *outs[1:], "--history")


def reports(root: Path) -> Iterator[Call]:
    """Yield calls of `report` on the tests' reports: one, several, and a history."""
    given = {
        "full": sample.full(),
        "unloaded": sample.unloaded(),
        "fail": sample.report("FAIL"),
        "inconclusive": sample.report("INCONCLUSIVE"),
        **{report.name: report for report in several.runs()},
    }
    for name, report in given.items():
        (root / name).mkdir(parents=True)
        (root / name / "report.json").write_text(to_json(report))
        yield f"report {name}", ("report", root / name)
    folders = [root / name for name in given]
    yield "report several", ("report", *folders)
    yield "report history", ("report", *folders, "--history")


def corpus_calls(folder: Path) -> Iterator[Call]:
    """Yield the calls that `calls.json` of a folder lists, with the paths of its results."""
    for name, words in json.loads((folder / "calls.json").read_text()).items():
        yield name, [word.replace("CORPUS", str(folder)) for word in words]


def calls(root: Path, corpus: Path | None) -> Iterator[Call]:
    pairs = write_pairs(root)
    yield from verdicts(pairs)
    yield from accepted(pairs)
    yield from evaluations(root)
    yield from reports(root / "reports")
    if corpus is not None:
        yield from corpus_calls(corpus)
