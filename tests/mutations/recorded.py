"""What the real vLLM did with each mutation, as scripts/mutations/record.py saw it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RECORDS = Path(__file__).parent / "vllm-0.32.0.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One mutation: `outcome` is "raises", "wrong" (loads and answers otherwise) or "alike".

    `detail` is vLLM's message, or the largest difference of a log-probability.
    """

    good: str
    name: str
    outcome: str
    detail: str


def read_records() -> list[Record]:
    """All records, in order; none where nothing was recorded yet."""
    if not RECORDS.exists():
        return []
    return [Record(**json.loads(line)) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def append_record(record: Record) -> None:
    """Add a line."""
    with RECORDS.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(record)) + "\n")
