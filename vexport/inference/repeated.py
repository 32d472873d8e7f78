"""Count responses that change if the same model runs again on the same documents.

In an evaluation, the baseline runs twice on its first documents, in different batches. A candidate
also runs twice if it is on a server or if the baseline is an accepted baseline. If many of these
responses change, a difference between two models may be noise of the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from vexport.errors import EnvironmentFault
from vexport.files import from_json, to_json, write_text
from vexport.outputs.manifest import record
from vexport.rules import environment

FILE = "repeat.json"
"""The file next to lm-eval's results that holds the counts."""
DOCUMENTS = 200
"""Number of documents to repeat, over all tasks together."""
MIN_DOCUMENTS = 20
"""Minimum number of documents to repeat for each task."""
MAX_CHANGED_SHARE = 0.005
"""Share of responses that may change: half a point, far below usual margins of 1 or 2 points."""
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Number of repeated documents, and of documents with a changed score (wrong to right or back).

    `sampled` is True if the documents have several seeds. Then responses may change, because the
    confidence interval includes this spread.
    """

    documents: int
    changed: int
    sampled: bool = False


def documents_to_repeat(tasks: int, limit: float | None) -> int:
    """Return how many of each task's first documents are repeated.

    `limit` is the maximum number of documents of each task.
    """
    share = max(MIN_DOCUMENTS, DOCUMENTS // max(1, tasks))
    return min(share, int(limit)) if limit is not None and limit >= 1 else share


def compare_rows(
    first: Mapping[str, Sequence[Row]], again: Mapping[str, Sequence[Row]]
) -> Repeated:
    """Count the documents with the same prompt in both runs, and those with a changed score.

    Only scores of 0 and 1 count.
    """
    before, now = _marks(first), _marks(again)
    common = before.keys() & now.keys()
    changed = [
        key
        for key in common
        if any(now[key].get(name) != mark for name, mark in before[key].items())
    ]
    return Repeated(
        documents=len({key[:2] for key in common}), changed=len({key[:2] for key in changed})
    )


def _marks(rows: Mapping[str, Sequence[Row]]) -> dict[tuple[object, ...], dict[str, float]]:
    marks: dict[tuple[object, ...], dict[str, float]] = {}
    for task, row in ((task, row) for task, task_rows in rows.items() for row in task_rows):
        metrics = row["metrics"]
        assert isinstance(metrics, list)
        scores = {str(name): row.get(name) for name in metrics}
        key = (task, row["doc_id"], row["filter"], row["prompt_hash"])
        numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
        marks[key] = {name: value for name, value in numbers.items() if value in (0, 1)}
    return marks


def write_repeated(folder: Path, repeated: Repeated) -> None:
    """Write the counts of repeated responses next to lm-eval's results."""
    record(folder / FILE)
    write_text(folder / FILE, to_json(repeated))


def read_repeated(folder: Path) -> Repeated | None:
    """Read the counts that `write_repeated` wrote. Return None if the folder has no such file."""
    return from_json(Repeated, folder / FILE) if (folder / FILE).is_file() else None


def require_deterministic(folder: Path, repeated: Repeated, alpha: float) -> None:
    """Raise EnvironmentFault if more than `MAX_CHANGED_SHARE` of the responses change.

    The decision is an exact binomial test at the level `alpha`.
    """
    common = repeated.documents
    changed = repeated.changed
    if not common or repeated.sampled:
        return
    if stats.binomtest(changed, common, MAX_CHANGED_SHARE, alternative="greater").pvalue > alpha:
        return
    raise EnvironmentFault.of(
        environment.NOISE,
        str(folder),
        found=f"{changed} of {common} responses changed",
        most=f"{MAX_CHANGED_SHARE:.1%}",
    )
