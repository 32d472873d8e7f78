"""What the real vLLM did with each mutation, as scripts/mutations/record.py saw it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDS = Path(__file__).parent / "vllm-0.32.0.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One mutation: `outcome` is "raises", "wrong" (loads and answers otherwise) or "alike".

    `detail` is vLLM's message, or the largest difference of a log-probability. `further` is how far the
    answers are from the unquantized model's (mean KL divergence) as a multiple of how far the sound
    checkpoint's are, where that was recorded.
    """

    good: str
    name: str
    outcome: str
    detail: str
    further: float | None = None


def read_records() -> list[Record]:
    """All records, in order; none where nothing was recorded yet."""
    if not RECORDS.exists():
        return []
    return [Record(**json.loads(line)) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def write_record(record: Record) -> None:
    """Add a record, in the place of the one that there is of this mutation."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines(keepends=True) if RECORDS.exists() else []
    line = json.dumps({key: value for key, value in asdict(record).items() if value is not None}) + "\n"
    start = json.dumps({"good": record.good, "name": record.name})[:-1] + ","
    places = [number for number, known in enumerate(lines) if known.startswith(start)]
    for number in places or [len(lines)]:
        lines[number : number + 1] = [line]
    RECORDS.write_text("".join(lines), encoding="utf-8")
