"""Time and memory of `plan`, `check` and `load --dry` of models of 405 B to 1 T, from headers alone.

    PYTHONPATH=. .venv/bin/python scripts/bench/large.py [--model DeepSeek-V3]... [--scheme W4A16]...
                                                         [--command check]... [--folder DIR]

The source has every header of the real model over files that are holes; the quantized checkpoint has those
that `vexport quantize` would write. `check` is called twice: on the holes, in which every scale is an error,
and with sound random numbers from one buffer in the place of small tensors, which takes all but the reading,
whose bytes are named. Seconds are of the processor, of all processes, and of the clock; memory is what all
processes had together at most, shared pages once. Linux only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.architectures.headers import CONFIGS, save_headers
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.writer import DEFAULT_SHARD_BYTES, header_bytes, write_index
from vexport.checks import check_checkpoint
from vexport.plan import build_plan
from vexport.plan.source import DEFAULTS, rules_for
from vexport.quantize.finishing import write_config
from vexport.quantize.stream import planned_shards
from vexport.types import TensorInfo

COMMANDS = ("plan", "check", "load")
LARGE = ("Llama-3.1-405B", "DeepSeek-V3", "Kimi-K2")
BUFFER = 1 << 24


class RandomReader(Reader):
    """Gives random numbers for every tensor, and notes how many bytes were asked for."""

    bytes_read = 0
    _random = np.random.default_rng(0)
    _codes = _random.integers(0, 256, BUFFER, np.uint8)
    _halves = _random.integers(0x3C00, 0x3C80, BUFFER // 2, np.uint16).view(np.uint8)
    _e4m3 = _random.integers(0x38, 0x7F, BUFFER, np.uint8)
    _numbers = {
        "BF16": _halves,
        "F8_E4M3": _e4m3,
        "F32": np.full(BUFFER // 4, 4096.0, np.float32).view(np.uint8),
    }

    def raw(self, tensor: TensorInfo) -> memoryview:
        """As many bytes as the tensor has; of larger ones than the buffer those of the file."""
        RandomReader.bytes_read += tensor.num_bytes
        own = self._numbers.get(tensor.dtype, self._codes)
        return super().raw(tensor) if tensor.num_bytes > BUFFER else own[: tensor.num_bytes].data

    def rows(self, tensor: TensorInfo, numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Rows of the buffer."""
        size = len(numbers) * tensor.num_bytes // tensor.shape[0]
        RandomReader.bytes_read += size
        return self._numbers.get(tensor.dtype, self._codes)[:size].reshape(len(numbers), -1)


def save_quantized(source: Path, folder: Path, scheme: str) -> None:
    """What a quantization would write: true headers and config over holes."""
    index = read_index(source)
    plan = build_plan(index, rules_for(scheme, observer=None, ignore=()), DEFAULTS)
    folder.mkdir()
    shards = planned_shards(index, plan, shard_bytes=DEFAULT_SHARD_BYTES)
    for shard in shards:
        header = header_bytes(shard.tensors)
        with (folder / shard.name).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + shard.num_bytes)
    write_index(folder, shards)
    write_config(index, plan, folder)


def check(checkpoint: Path) -> str:
    """Check a checkpoint's headers and random numbers."""
    import vexport.checks

    vexport.checks.Reader = RandomReader  # type: ignore[attr-defined]
    findings = check_checkpoint(str(checkpoint)).findings
    errors = {finding.check for finding in findings if finding.severity == "error"} - {"tokenizer"}
    return (
        f"{RandomReader.bytes_read / 1e9:.1f} GB asked for, {len(errors)} families with errors {errors or ''}"
    )


def main(models: Sequence[str], schemes: Sequence[str], commands: Sequence[str], folder: Path) -> None:
    """Print a row for each call."""
    print("| call | exit code | processor | clock | memory |")
    print("|---|---|---|---|---|")
    for model in models:
        source = folder / model
        if not (source / "config.json").is_file():
            save_headers(model, source)
        for scheme in schemes:
            quantized = folder / f"{model}-{scheme}"
            if not quantized.is_dir():
                save_quantized(source, quantized, scheme)
            calls = {
                "plan": [["-m", "vexport", "plan", str(source), "--scheme", scheme]],
                "check": [
                    ["-m", "vexport", "check", str(quantized)],
                    [__file__, "--checked", str(quantized)],
                ],
                "load": [["-m", "vexport", "load", "--dry", str(quantized)]],
            }
            for command in commands:
                for call in calls[command]:
                    measured(f"{command} {model} {scheme}", call)


def measured(title: str, arguments: Sequence[str]) -> None:
    """Print what a call of Python takes; its last line too, if it is a sound `check`."""
    start, most, seconds = time.monotonic(), 0.0, dict[int, float]()
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen([sys.executable, *arguments], stdout=answer, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            processes = list(tree(process.pid))
            seconds.update({number: spent(number) for number in processes})
            most = max(most, sum(memory(number) for number in processes))
            time.sleep(0.1)
        answer.seek(0)
        said = f" ({answer.read().strip()})" if "--checked" in arguments else ""
    clock = time.monotonic() - start
    print(
        f"| {title}{said} | {process.returncode} | {sum(seconds.values()):.0f} s | {clock:.0f} s | ", end=""
    )
    print(f"{most:.0f} MB |", flush=True)


def tree(number: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield number
    for thread in Path(f"/proc/{number}/task").glob("*/children"):
        for child in _read(thread).split():
            yield from tree(int(child))


def spent(number: int) -> float:
    """Seconds of the processor."""
    fields = _read(Path(f"/proc/{number}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def memory(number: int) -> float:
    """Megabytes; what processes share is divided among them."""
    lines = _read(Path(f"/proc/{number}/smaps_rollup")).splitlines()
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


def _read(file: Path) -> str:
    """A file of a process; nothing where it has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(CONFIGS))
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--command", action="append", choices=COMMANDS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--checked", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.checked:
        print(check(given.checked))
        raise SystemExit
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        main(given.model or LARGE, given.scheme or ["W4A16"], given.command or COMMANDS, folder)
