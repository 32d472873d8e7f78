"""A run that is killed at random and continued ends with the report of an unbroken one.

    .venv/bin/python scripts/random_kills.py SCENARIO FOLDER [--kills 5] [--also REGEX] [--seed 0]

runs the scenario unbroken into FOLDER/unbroken/run, then into FOLDER/killed/run, where SIGKILL ends it at as
many moments: the unbroken run's time is cut into equal parts, and one moment is drawn from each, so that a
long stage is struck more often. `--also` strikes once more in every stage whose name matches, however short
(logprobs, say). It exits with 1 where the reports differ in more than times, where runs ended before so many
strikes, or where a question was answered twice: answers are appended as they come, so that an answer that was
kept and asked again would stand there twice. Both folders are replaced.
"""

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from results import differences, kept_answers

from vexport.types import Json

# A stage begins with `name ...` on stderr; what it did before it is said as `name: 3 of 30, 5 s left`.
_BEGIN = re.compile(r"^(?P<stage>.+) \.\.\.$")


def main() -> int:
    """Compare an unbroken run with one that is killed; the exit code says whether they agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenario", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--also", metavar="REGEX", help="strike once more in every stage that this matches")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Not in one folder: a run takes the baseline's answers of its neighbours.
    unbroken, killed = (arguments.folder / name / "run" for name in ("unbroken", "killed"))
    for folder in (unbroken, killed):
        shutil.rmtree(folder.parent, ignore_errors=True)
    code, began = run(arguments.scenario, unbroken)
    # Kernels that the unbroken run has compiled are not compiled again.
    stages = [stage for stage in began if not stage[0].startswith("compile")]
    total = sum(seconds for _, seconds in stages)
    print(f"unbroken: exit {code}, {len(stages)} stages, {total:.0f} s; {counted(unbroken)}", file=sys.stderr)
    problems, struck = list[str](), 0
    names = [name for name, _ in stages]
    before = ("", 0.0)
    for stage, offset in moments(stages, arguments.kills, arguments.also, random.Random(arguments.seed)):
        # What was done of a stage when it was struck is kept: it takes less time, or does not come again.
        strike = dict.fromkeys((name for name, _ in stages[names.index(stage) :]), 0.0)
        strike[stage] = offset - before[1] if stage == before[0] else offset
        before = (stage, offset)
        ended, _ = run(arguments.scenario, killed, strike)
        how = "killed" if ended == -signal.SIGKILL else f"ended before, exit {ended}"
        print(f"{offset:.1f} s into {stage!r}: {how}; {counted(killed)}", file=sys.stderr)
        struck += ended == -signal.SIGKILL
    again, _ = run(arguments.scenario, killed)
    print(f"continued: exit {again}; {counted(killed)}", file=sys.stderr)
    problems += [*differences(report_of(unbroken), report_of(killed), "report"), *asked_twice(killed)]
    if struck < arguments.kills:
        problems.append(f"killed {struck} times: the others came after the run's end")
    if again != code:
        problems.append(f"exit codes {code} and {again}")
    print("\n".join(problems) or "the reports are the same but for times; no answer was asked twice")
    return 1 if problems else 0


def moments(
    stages: Sequence[tuple[str, float]], kills: int, also: str | None, dice: random.Random
) -> list[tuple[str, float]]:
    """(stage, seconds into it), in the run's order: one from each of `kills` equal parts of its time."""
    starts = list(accumulate((seconds for _, seconds in stages), initial=0.0))
    times = [(number + dice.random()) * starts[-1] / kills for number in range(kills)]
    if also:
        times += [
            start + dice.random() * seconds
            for start, (name, seconds) in zip(starts, stages, strict=False)
            if re.search(also, name)
        ]
    places = [(bisect_right(starts, moment) - 1, moment) for moment in sorted(times)]
    return [(stages[index][0], moment - starts[index]) for index, moment in places]


def run(
    scenario: Path, folder: Path, strike: Mapping[str, float] | None = None
) -> tuple[int, Sequence[tuple[str, float]]]:
    """(exit code, stages with their seconds) of `vexport run`.

    The first stage that `strike` names is killed so many seconds after it begins.
    """
    command = [sys.executable, "-m", "vexport", "run", str(scenario), "--run-dir", str(folder)]
    began: list[tuple[str, float]] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            stage = _BEGIN.match(line.rstrip())
            if stage is None:
                continue
            began.append((stage["stage"], time.monotonic()))
            if strike and stage["stage"] in strike:
                time.sleep(strike[stage["stage"]])
                process.kill()
                strike = None
    ends = [*(moment for _, moment in began[1:]), time.monotonic()]
    return process.returncode, [(name, end - moment) for (name, moment), end in zip(began, ends, strict=True)]


def report_of(folder: Path) -> Json:
    """The report of a run, wherever it is."""
    text = (folder / "report.json").read_text(encoding="utf-8")
    report: Json = json.loads(text.replace(str(folder), "RUN"))
    return report


def asked_twice(folder: Path) -> Iterator[str]:
    """Questions that have more than one answer in a session's journal."""
    for journal, keys in kept_answers(folder).items():
        if len(set(keys)) < len(keys):
            yield f"{journal}: {len(keys) - len(set(keys))} of {len(keys)} answers asked twice"


def counted(folder: Path) -> str:
    """How many answers each session has."""
    kept = kept_answers(folder)
    return (
        ", ".join(f"{Path(path).parent.name} {len(keys)} answers" for path, keys in kept.items())
        or "no answers"
    )


if __name__ == "__main__":
    sys.exit(main())
