"""Read the scores of one model, from whatever file or folder has them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from vexport.errors import InputError
from vexport.foreign import json_lines
from vexport.names import result_files
from vexport.rules import results as rules
from vexport.scores.readers import evalscope, jsonl, lighteval
from vexport.scores.readers.accepted import is_accepted, read_accepted_table
from vexport.scores.readers.lm_eval import read_lm_eval
from vexport.scores.readers.rows import Response, task_tables
from vexport.scores.table import ScoreTable

LM_EVAL = "lm-eval"
_READERS: Mapping[str, Callable[[Path], Iterator[Response]]] = {
    lighteval.NAME: lighteval.read_details,
    evalscope.NAME: evalscope.read_reviews,
    jsonl.NAME: jsonl.read_plain,
}


def read_baseline(path: Path, names: Collection[str] = ()) -> ScoreTable:
    """Read an accepted baseline, or results as `read_scores` does."""
    return read_accepted_table(path, names) if is_accepted(path) else read_scores(path, names)


def read_scores(path: Path, names: Collection[str] = ()) -> ScoreTable:
    """Read results of lm-eval, lighteval, EvalScope, or plain JSON lines.

    `names` selects tasks and groups. Without names, all tasks are read.

    Raises:
        InputError: If the results are missing, broken, or from several harnesses or models.
        MissingPackage: If lighteval's details need pyarrow and it is not installed.
    """
    harness = harness_of(path)
    if harness == LM_EVAL:
        return read_lm_eval(path, names)
    tasks = task_tables(_READERS[harness](path))
    return ScoreTable(file=path, tasks=tasks, names=tuple(tasks), harness=harness).selected(names)


def harness_of(path: Path) -> str:
    """Return the harness that wrote a file or a folder of results.

    Return "lm-eval" for a path without results. The reader of lm-eval's results then raises an
    error with the path.

    Raises:
        InputError: If a folder has results of several harnesses.
    """
    if path.is_file():
        return _harness_of_file(path)
    found: list[str] = []
    if lighteval.details_files(path):
        found.append(lighteval.NAME)
    if evalscope.review_files(path):
        found.append(evalscope.NAME)
    has_samples = any(path.rglob("samples_*.jsonl"))
    if has_samples or (not found and result_files(path)):
        found.append(LM_EVAL)
    if not found and jsonl.plain_files(path):
        found.append(jsonl.NAME)
    if len(found) > 1:
        raise InputError.of(rules.SEVERAL_HARNESSES, str(path), names=found)
    return found[0] if found else LM_EVAL


def _harness_of_file(path: Path) -> str:
    if path.suffix == ".parquet":
        return lighteval.NAME
    if path.suffix != ".jsonl":
        return LM_EVAL
    for where, row in json_lines(path, "a scored document"):
        if "sample_score" in row:
            return evalscope.NAME
        if "doc_id" in row and "resps" in row:
            raise InputError.of(rules.SAMPLES_ALONE, where)
        break
    return jsonl.NAME
