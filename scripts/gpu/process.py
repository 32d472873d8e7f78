"""Run a stage of the measurements in the process that was started for it."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from rows import Sizes


def run_here(stage: str, device: str, folder: Path, checkpoints: tuple[Path, ...] = ()) -> None:
    """Run a stage in this process.

    Write its rows to STAGE.jsonl as they come, and its output to STAGE.log.
    """
    with (folder / f"{stage}.log").open("w") as log, (folder / f"{stage}.jsonl").open("w") as lines:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        import stages  # after the redirection, because imports print as well

        sizes = replace(Sizes.of(device), checkpoints=checkpoints)
        for row in getattr(stages, stage)(device, sizes, folder):
            print(json.dumps(asdict(replace(row, stage=stage))), file=lines, flush=True)
