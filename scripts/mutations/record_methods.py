"""Records what vLLM does with spoiled checkpoints of other quantization methods (tests/mutations/methods.py).

    PYTHONPATH=. .venv/bin/python scripts/mutations/record_methods.py [--only gptq ...]

By a dry load on SM 90, which refuses, or accepts and computes nothing: then by whether the producer's own
formula makes other weights of it. What is recorded already is left out.
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
from record import MOST_MESSAGE, Job, make_folders

from tests.checks.quant_methods import CHECKPOINTS
from tests.mutations.methods import HARMLESS, METHOD_RECORDS, SOURCE, method_mutations, write_methods
from tests.mutations.recorded import Record, read_records, write_record
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.vllm.quant_methods import MethodGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.fidelity.dequantize import read_parameters
from vexport.fidelity.quant_methods import own_weight


def main() -> None:
    """Record what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(CHECKPOINTS), help="these checkpoints")
    names = parser.parse_args().only or list(CHECKPOINTS)
    done = {(record.good, record.name) for record in read_records(METHOD_RECORDS)}
    with tempfile.TemporaryDirectory() as folder:
        root = write_methods(Path(folder), names)
        jobs = [
            Job(
                good=good,
                name=name,
                change=change,
                sound=root / good,
                folder=root / f"{good}-{number}",
                source=root / SOURCE,
            )
            for good in names
            for number, (name, change) in enumerate(method_mutations(good).items())
            if (good, name) not in done
        ]
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
        _note(Record(good=job.good, name=job.name, outcome=outcome, detail=detail))


def accepted(job: Job) -> tuple[str, str]:
    """The outcome and detail of what a dry load accepts."""
    if job.name in HARMLESS:
        return "alike", "a dry load"
    old, new = weights(job.sound), weights(job.folder)
    others = [name for name, weight in old.items() if name in new and not torch.equal(weight, new[name])]
    if old.keys() != new.keys() or not others:
        return "loads", "a dry load"
    return "wrong", f"by the producer's formula {others[0]} is another weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The quantized layers' weights by their producer's formula; without those whose tensors do not fit."""
    found = {}
    with Reader() as reader:
        view = CheckpointView(read_index(folder), reader)
        for fused in view.fused_linears:
            group = view.group_of(fused)
            for name, parameters in fused.members.items():
                if isinstance(group, MethodGroup) and fused.is_quantized:
                    with suppress(ValueError, RuntimeError, IndexError, KeyError):
                        found[name] = own_weight(group, read_parameters(view, parameters))
    return found


def _note(record: Record) -> None:
    write_record(record, METHOD_RECORDS)
    print(f"{record.good}: {record.name}: {record.outcome} {record.detail}", flush=True)


if __name__ == "__main__":
    main()
