"""Time and memory of `quantize` from 1 B to 1 T parameters: predicted by `plan`, and measured.

    PYTHONPATH=. .venv/bin/python scripts/bench/sizes.py [--model Llama-3.1-8B]... [--scheme W4A16]
                                                         [--folder DIR] [--gigabytes 6] [--predict]

Sources have every header of the real model over files that are holes: they read as zeros from memory, and
take no disk. A model whose result has more than so many gigabytes is written in part: 1/N of it, N being the
number of its files. Seconds are of the processor, all threads; memory is the largest resident set; what is
written is removed. The prediction for a part is the share of the bytes read of the plan's for the model.
Prints a table in Markdown and a chart in text. `--predict` runs nothing: it prints each stage on 1, 8 and 64
workers, of two cores each. Linux only.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import struct_rusage

from tests.architectures.headers import CONFIGS, SMALLER, save_headers
from vexport.checkpoint.index import read_index
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES
from vexport.plan import build_plan
from vexport.plan.estimates import Samples, estimates, start_seconds
from vexport.plan.source import DEFAULTS, rules_for
from vexport.quantize.parts import bytes_read, dealt
from vexport.quantize.stream import planned_shards
from vexport.types import Estimate

MODELS = ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.3-70B", "Llama-3.1-405B", "DeepSeek-V3", "Kimi-K2")
PREDICTED = ("Llama-3.1-8B", "Llama-3.3-70B", "DeepSeek-V3", "Kimi-K2")
WORKERS = (1, 8, 64)
SAMPLES = Samples(number=512, tokens=2048)
GIGA = 1e9
# The longest bar of the chart, in characters.
BAR = 24


def source_of(model: str, folder: Path) -> Path:
    """The folder of a model's headers, made where it is not there."""
    source = folder / model
    if not (source / "config.json").is_file():
        save_headers(model, source)
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What quantizing a model or a part of it took: a row of the table, and a line of the chart."""

    model: str
    parameters: int
    run: str
    read: int
    seconds: float
    predicted_seconds: float
    memory: int
    predicted_memory: int

    @property
    def seconds_per_gigabyte(self) -> float:
        return self.seconds / self.read * GIGA

    def __str__(self) -> str:
        """A row in Markdown."""
        return (
            f"| {self.model} | {self.parameters / GIGA:,.0f} B | {self.run} | {self.read / GIGA:.1f} GB | "
            f"{self.seconds:.0f} s | {self.seconds_per_gigabyte:.2f} s | "
            f"{self.predicted_seconds:.0f} s ({_error(self.predicted_seconds, self.seconds)}) | "
            f"{self.memory / 1e6:,.0f} MB | "
            f"{self.predicted_memory / 1e6:,.0f} MB ({_error(self.predicted_memory, self.memory)}) |"
        )


def chart(rows: Sequence[Measured]) -> str:
    """Time for a GB and memory, as bars as long as their shares of the largest."""
    longest = max(len(row.model) for row in rows)
    lines = [f"{'':{longest}}  {'seconds of the processor a GB':{BAR + 8}}memory"]
    for row in rows:
        time_bar = _bar(row.seconds_per_gigabyte, max(one.seconds_per_gigabyte for one in rows))
        memory_bar = _bar(row.memory, max(one.memory for one in rows))
        lines.append(
            f"{row.model:{longest}}  {time_bar:{BAR}} {row.seconds_per_gigabyte:4.2f} s "
            f"{memory_bar:{BAR}} {row.memory / 1e6:,.0f} MB"
        )
    return "\n".join(lines)


def _bar(value: float, largest: float) -> str:
    return "\u2588" * max(round(BAR * value / largest), 1)


def measure(model: str, scheme: str, folder: Path, most: float) -> Measured | str:
    """Quantize a model or a part of it; the row of one that failed."""
    source, out = source_of(model, folder), folder / "written" / "out"
    index = read_index(source)
    plan = build_plan(index, rules_for(scheme, observer=None, ignore=()), DEFAULTS)
    shards = planned_shards(index, plan, shard_bytes=DEFAULT_SHARD_BYTES)
    parts = len(shards) if sum(shard.num_bytes for shard in shards) > most * GIGA else 1
    read = sum(bytes_read(unit, index) for shard in dealt(shards, parts, index)[0] for unit in shard.units)
    call = [sys.executable, "-m", "vexport", "quantize", str(source), str(out), "--scheme", scheme, "--quiet"]
    process = subprocess.Popen(
        [*call, *(["--part", f"1/{parts}"] if parts > 1 else [])], stdout=subprocess.DEVNULL
    )
    memory, usage = watched(process)
    shutil.rmtree(out.parent)
    if process.returncode:
        return f"| {model} | exit code {process.returncode} |"
    seconds, share = usage.ru_utime + usage.ru_stime, read / index.num_bytes
    start, expected = start_seconds(index), _stage(index_estimates(source, scheme), "quantize")
    return Measured(
        model=model,
        parameters=index.num_parameters,
        run="whole" if parts == 1 else f"part 1/{parts}",
        read=read,
        seconds=seconds,
        # Rates are of two cores: a second of the estimate is two of the processor, but for the start.
        predicted_seconds=start + 2 * (expected.seconds - start) * share,
        memory=memory,
        predicted_memory=expected.memory_bytes,
    )


def watched(process: "subprocess.Popen[bytes]") -> tuple[int, struct_rusage]:
    """The largest resident set of a process in bytes, and its usage, whose own figure begins with ours."""
    most, status_file = 0, Path(f"/proc/{process.pid}/status")
    while True:
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if found:
            process.returncode = os.waitstatus_to_exitcode(status)
            return most * 1024, usage
        lines = [line.split() for line in status_file.read_text().splitlines() if line.startswith("VmHWM")]
        most = max([most, *(int(fields[1]) for fields in lines)])
        time.sleep(0.05)


def index_estimates(source: Path, scheme: str) -> Sequence[Estimate]:
    """The estimates of a plan with calibration text, if the scheme needs any."""
    index = read_index(source)
    plan = build_plan(index, rules_for(scheme, observer=None, ignore=()), DEFAULTS)
    return estimates(index, plan, SAMPLES)


def _stage(found: Sequence[Estimate], stage: str) -> Estimate:
    return next(one for one in found if one.stage == stage)


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"


def predict(model: str, scheme: str, folder: Path) -> str:
    """Rows of a model: each stage's time by workers, and its memory."""
    source = source_of(model, folder)
    index = read_index(source)
    plan = build_plan(index, rules_for(scheme, observer=None, ignore=()), DEFAULTS)
    files = len(planned_shards(index, plan, shard_bytes=DEFAULT_SHARD_BYTES))
    rows, start = [], start_seconds(index)
    for one in estimates(index, plan, SAMPLES):
        most = {"calibrate": SAMPLES.number, "quantize": files}.get(one.stage, max(WORKERS))
        times = [_time(start + (one.seconds - start) / min(most, count)) for count in WORKERS]
        rows.append(
            f"| {model} | {scheme} | {one.stage} | {' | '.join(times)} | {one.memory_bytes / GIGA:.1f} GB |"
        )
    return "\n".join(rows)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=(*CONFIGS, *SMALLER))
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--predict", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.predict:
            print("| model | scheme | stage | 1 worker | 8 | 64 | memory of each |")
            print("|---|---|---|---|---|---|---|")
            for model in given.model or PREDICTED:
                print(predict(model, given.scheme, folder), flush=True)
        else:
            print("| model | parameters | run | read | processor | a GB | predicted | memory | predicted |")
            print("|---|---|---|---|---|---|---|---|---|")
            measured = []
            for model in given.model or MODELS:
                measured.append(measure(model, given.scheme, folder, given.gigabytes))
                print(measured[-1], flush=True)
            print(chart([row for row in measured if isinstance(row, Measured)]))
