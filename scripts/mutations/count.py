"""Count the recorded mutations, and those that `check` finds, for vexport/docs/results.md.

    PYTHONPATH=. .venv/bin/python scripts/mutations/count.py [--methods | --sentences]

`tests/mutations --whole` shows that `check` finds every harmful mutation that no list in
tests/mutations/recorded.py excepts. `--sentences` prints the parts of the README's sentences.
"""

import argparse
from collections.abc import Sequence

from tests.mutations.methods import METHOD_RECORDS, RUN_RECORDS
from tests.mutations.recorded import (
    FOUND_BY_LOADERS,
    FOUND_BY_RUNNING,
    FOUND_WITH_WARNING,
    Record,
    is_as_good,
    is_counted,
    read_records,
)

METHODS = {
    RUN_RECORDS: "run by vLLM's CPU build",
    METHOD_RECORDS: "judged by vLLM's dry load on SM 90",
}


def harmful(records: Sequence[Record]) -> list[str]:
    """Return the mutations that vLLM refuses, or that make its responses worse."""
    return [
        f"{record.good}: {record.name}: {record.outcome}"
        for record in records
        if is_counted(record) and record.outcome in ("raises", "wrong") and not is_as_good(record)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--methods", action="store_true", help="other quantization methods")
    choice.add_argument("--sentences", action="store_true", help="parts of sentences")
    given = parser.parse_args()
    if given.methods:
        print(
            "| checkpoints | harmful checkpoints that `check` finds | false alarms |\n|---|---|---|"
        )
        for file, how in METHODS.items():
            records = read_records(file)
            count = len(harmful(records))
            alike = [each for each in records if is_counted(each) and each.outcome == "alike"]
            title = f"{len(records)} corrupted checkpoints of other methods, {how}"
            print(f"| {title} | {count} of {count} | 0 of {len(alike)} |")
        return
    records = read_records()
    worse = set(harmful(records))
    static = len(worse - FOUND_BY_RUNNING - FOUND_WITH_WARNING - FOUND_BY_LOADERS)
    found = len(worse - FOUND_BY_RUNNING - FOUND_WITH_WARNING)
    warned = len(worse & FOUND_WITH_WARNING)
    fine = len(records) - len(worse)
    if given.sentences:
        print(f"in {len(records):,} ways. {len(worse):,} of these")
        print(f"finds {found:,} of them, and warns of {warned}. The other {fine:,} are harmless")
        return
    print("| in vLLM | checkpoints | `check` |\n|---|---|---|")
    finds = f"finds {static:,} with `--static --source`, and {found:,} with vLLM's loaders, too"
    print(f"| refused, or responses are worse | {len(worse):,} | {finds} |")
    print(f"| harmless | {fine:,} | no error |")


if __name__ == "__main__":
    main()
