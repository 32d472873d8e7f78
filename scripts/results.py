"""What two results of a command must have in common: all but times, and each answer given once."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from vexport.types import Json

# What says when, how long, how fast and where, and so differs from run to run.
_TIMES = re.compile(
    r"^command$|seconds|duration|started|finished|created|date|elapsed|^time|_at$|timings|log_tail"
    r"|ttft|itl|^runs$|^mad$|rates|host|available"
)


def differences(undisturbed: Json, disturbed: Json, where: str) -> Iterator[str]:
    """What differs between two results, but for times."""
    if isinstance(undisturbed, dict) and isinstance(disturbed, dict):
        for key in sorted({*undisturbed, *disturbed}):
            if not _TIMES.search(key):
                yield from differences(undisturbed.get(key), disturbed.get(key), f"{where}.{key}")
    elif isinstance(undisturbed, list) and isinstance(disturbed, list) and len(undisturbed) == len(disturbed):
        for number, (left, right) in enumerate(zip(undisturbed, disturbed, strict=True)):
            yield from differences(left, right, f"{where}[{number}]")
    elif undisturbed != disturbed:
        yield f"{where}: {json.dumps(undisturbed)[:150]}, then {json.dumps(disturbed)[:150]}"


def kept_answers(folder: Path) -> dict[str, list[str]]:
    """The keys of the answers that each session's journal has: its whole lines, but the first."""
    kept = {}
    for path in sorted(folder.rglob("answers.jsonl")):
        lines = path.read_bytes()
        whole = lines[: lines.rfind(b"\n") + 1].splitlines()
        kept[str(path.relative_to(folder))] = [json.dumps(json.loads(line)[0]) for line in whole[1:]]
    return kept
