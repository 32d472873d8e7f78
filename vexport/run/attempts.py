"""The rounds of `vexport run --until-pass`: what failed is set aside whole, what it was made from stays."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vexport.files import from_json, to_json, write_text
from vexport.run.directory import MARK, STAGES_FILE, RunDirectory
from vexport.run.serving import BASELINE
from vexport.types import Attempt, Promotion

ATTEMPTS = "attempts"
FILE = "attempts.json"
# What is known of the baseline, whatever is compared with it.
BASELINE_STAGES = (f"serve {BASELINE}", f"load {BASELINE}")
# What the next round starts from as well.
SHARED_STAGES = ("calibrate", "sensitivity", *BASELINE_STAGES)
SHARED_FILES = (
    "calibration",
    "sensitivity",
    "sensitivity.json",
    "mixed.json",
    ATTEMPTS,
    FILE,
    MARK,
    STAGES_FILE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The rounds that failed, and what was promoted for the one that runs.

    `seconds` is what the stages took that the failed rounds had for themselves.
    """

    failed: tuple[Attempt, ...] = ()
    current: tuple[Promotion, ...] = ()
    seconds: float = 0.0

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """All promotions in their order; the last one of a group counts."""
        return (*(promotion for attempt in self.failed for promotion in attempt.promotions), *self.current)


def read_attempts(folder: Path) -> Attempts:
    """The rounds of a run directory so far."""
    file = folder / FILE
    return from_json(Attempts, file) if file.is_file() else Attempts()


def set_aside(
    directory: RunDirectory, attempt: Attempt, before: Attempts, promotions: tuple[Promotion, ...]
) -> None:
    """Move a failed round's results to its folder and begin the next with these promotions.

    Stages are forgotten first and the rounds written last: a call broken off between repeats the round.
    """
    spent = sum(seconds for stage, seconds in directory.seconds.items() if stage not in SHARED_STAGES)
    directory.forget_all_but(SHARED_STAGES)
    for path in _own(directory.root):
        target = directory.root / attempt.folder / path.relative_to(directory.root)
        remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    failed, seconds = (*before.failed, attempt), round(before.seconds + spent, 3)
    attempts = Attempts(failed=failed, current=promotions, seconds=seconds)
    write_text(directory.root / FILE, to_json(attempts))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _own(root: Path) -> Iterator[Path]:
    """What belongs to the round alone: all but what is shared, and the baseline's answers."""
    for path in sorted(root.iterdir()):
        if path.name == "eval":
            yield from (part for part in sorted(path.iterdir()) if part.name != BASELINE)
        elif path.name not in SHARED_FILES:
            yield path
