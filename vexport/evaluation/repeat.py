"""The model against itself: first documents of each task asked again, in other batches of the same engine.

Answers that change tell that the engine is not deterministic; then a difference between two models tells
nothing of the models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from vexport.errors import EnvironmentFault
from vexport.files import from_json, to_json, write_text

FILE = "repeat.json"
"""Next to lm-eval's results."""
DOCUMENTS = 200
"""Asked again, over all tasks; at least LEAST of each."""
LEAST = 20
TOLERATED = 0.005
"""Share of answers that may change: half a point is far below what a verdict of 1 or 2 points rests on."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """The number of documents asked again, and of those that changed from wrong to right or back."""

    documents: int
    changed: int


def documents_to_repeat(tasks: int, limit: float | None) -> int:
    """Return how many documents of each task, from its first on, are asked again; `limit` is that of the
    tasks.
    """
    share = max(LEAST, DOCUMENTS // max(1, tasks))
    return min(share, int(limit)) if limit is not None and limit >= 1 else share


def compare_rows(first: Mapping[str, Sequence[Row]], again: Mapping[str, Sequence[Row]]) -> Repeated:
    """Count the documents whose scores of 0 and 1 changed, among those that were asked the same question."""
    before = {(task, *_key(row)): _marks(row) for task, rows in first.items() for row in rows}
    asked: set[tuple[str, object]] = set()
    changed: set[tuple[str, object]] = set()
    for task, rows in again.items():
        for row in rows:
            marks = before.get((task, *_key(row)))
            if marks is None:
                continue
            asked.add((task, row["doc_id"]))
            now = _marks(row)
            if any(now.get(name) != mark for name, mark in marks.items()):
                changed.add((task, row["doc_id"]))
    return Repeated(documents=len(asked), changed=len(changed))


def _key(row: Row) -> tuple[object, object, object]:
    return row["doc_id"], row["filter"], row["prompt_hash"]


def _marks(row: Row) -> dict[str, float]:
    """The scores that say right or wrong."""
    metrics = row["metrics"]
    assert isinstance(metrics, list)
    scores = {str(name): row.get(name) for name in metrics}
    return {
        name: float(score)
        for name, score in scores.items()
        if isinstance(score, (bool, int, float)) and score in (0, 1)
    }


def write_repeated(folder: Path, repeated: Repeated) -> None:
    """Put it next to lm-eval's results."""
    write_text(folder / FILE, to_json(repeated))


def read_repeated(folder: Path) -> Repeated | None:
    """Read the counts of `write_repeated`; None for a folder made elsewhere."""
    return from_json(Repeated, folder / FILE) if (folder / FILE).is_file() else None


def require_deterministic(folder: Path, repeated: Repeated, alpha: float) -> None:
    """EnvironmentFault where more than TOLERATED of the answers change (exact binomial test at `alpha`)."""
    asked, changed = repeated.documents, repeated.changed
    if not asked or stats.binomtest(changed, asked, TOLERATED, alternative="greater").pvalue > alpha:
        return
    raise EnvironmentFault(
        str(folder),
        got=f"{changed} of {asked} answers changed when the same model was asked again: above "
        f"{TOLERATED:.1%} there is no verdict",
        need="",
        fix="use greedy decoding and one kind of GPU; try VLLM_BATCH_INVARIANT=1 or fewer sequences at once",
    )
