"""Records what vLLM does with spoiled checkpoints of other quantization methods (tests/mutations/methods.py).

    PYTHONPATH=. .venv/bin/python scripts/mutations/record_methods.py [--only gptq ...]
    PYTHONPATH=. .venv/bin/python scripts/mutations/record_methods.py --run [--only gptq ...]

By a dry load on SM 90, which refuses, or accepts and computes nothing: then by whether `check` reads other
weights of it (tests/checks/test_quant_methods.py holds what it reads to the producers' formulas). With
`--run` by loading them and comparing the answers, as record.py does, where vLLM's CPU build has a kernel for
the sound one. What is recorded already is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from record import MOST_MESSAGE, Job, in_turns, jobs_of, make_folders
from record import record as run

from tests.checks.quant_methods import CHECKPOINTS
from tests.mutations.methods import (
    HARMLESS,
    METHOD_RECORDS,
    RUN,
    RUN_RECORDS,
    SOURCE,
    method_mutations,
    write_methods,
)
from tests.mutations.recorded import Record, read_records, write_record
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.translated import translate
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import dequantized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(CHECKPOINTS), help="these checkpoints")
    parser.add_argument("--run", action="store_true", help="load and run them, not dry")
    given = parser.parse_args()
    names = given.only or list(RUN if given.run else CHECKPOINTS)
    file = RUN_RECORDS if given.run else METHOD_RECORDS
    done = {(record.good, record.name) for record in read_records(file)}
    with tempfile.TemporaryDirectory() as folder:
        root = write_methods(Path(folder), names)
        every = in_turns(jobs_of(root, name, method_mutations(name), root / SOURCE) for name in names)
        jobs = [job for job in every if (job.good, job.name) not in done]
        if given.run:
            run(jobs, file)
        elif jobs:
            load_dry(jobs)


def load_dry(jobs: Sequence[Job]) -> None:
    """Ask vLLM's classes and loaders about all of them in one call; a sound one that is refused ends it."""
    make_folders(jobs)
    folders = [*dict.fromkeys(job.sound for job in jobs), *(job.folder for job in jobs)]
    command = (sys.executable, "-m", "vexport", "load", "--dry", *map(str, folders), "--sm", "90")
    ran = subprocess.run((*command, "--format", "json", "--quiet"), capture_output=True, text=True)
    reports = {report["checkpoint"]: report for report in json.loads(ran.stdout)}
    for job in jobs:
        if not reports[str(job.sound)]["ok"]:
            sys.exit(f"{job.good}: {reports[str(job.sound)]['findings']}")
        errors = [each["got"] for each in reports[str(job.folder)]["findings"] if each["severity"] == "error"]
        if errors:
            outcome, detail = "raises", " ".join(errors[0].split())[:MOST_MESSAGE]
        else:
            outcome, detail = accepted(job)
        write_record(Record(good=job.good, name=job.name, outcome=outcome, detail=detail), METHOD_RECORDS)
        print(f"{job.good}: {job.name}: {outcome} {detail}", flush=True)


def accepted(job: Job) -> tuple[str, str]:
    if job.name in HARMLESS:
        return "alike", "a dry load"
    old, new = weights(job.sound), weights(job.folder)
    others = [name for name, weight in old.items() if name in new and not torch.equal(weight, new[name])]
    if old.keys() != new.keys() or not others:
        return "loads", "a dry load"
    return "wrong", f"{others[0]} is another weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The quantized layers' weights; without those whose tensors do not fit."""
    found = {}
    with Reader() as reader:
        view = translate(CheckpointView(read_index(folder), reader))
        for fused in view.fused_linears:
            for name in fused.members:
                with suppress(ValueError, RuntimeError, IndexError, KeyError):
                    if (weight := dequantized(view, name)) is not None:
                        found[name] = weight
    return found


if __name__ == "__main__":
    main()
