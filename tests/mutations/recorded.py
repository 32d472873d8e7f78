"""What the real vLLM did with each mutation, as scripts/mutations/record.py saw it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
# The newest vLLM that runs on a CPU.
PINNED_RECORDS = FOLDER / "vllm-0.32.0.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One mutation: `outcome` is "raises", "wrong" (loads and answers otherwise) or "alike"; "loads" where
    only a dry load was asked, which computes nothing.

    `detail` is vLLM's message, or the largest difference of a log-probability. `further` is how far the
    answers are from the unquantized model's (mean KL divergence) as a multiple of how far the sound
    checkpoint's are, where that was recorded.
    """

    good: str
    name: str
    outcome: str
    detail: str
    further: float | None = None


def read_records(file: Path = PINNED_RECORDS) -> list[Record]:
    """All records of one vLLM, in order; none where nothing was recorded yet."""
    if not file.exists():
        return []
    return [Record(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def write_record(record: Record, file: Path) -> None:
    """Add a record, in the place of the one that there is of this mutation."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    line = json.dumps({key: value for key, value in asdict(record).items() if value is not None}) + "\n"
    start = json.dumps({"good": record.good, "name": record.name})[:-1] + ","
    places = [number for number, known in enumerate(lines) if known.startswith(start)]
    for number in places or [len(lines)]:
        lines[number : number + 1] = [line]
    file.write_text("".join(lines), encoding="utf-8")
