"""Time and memory of `plan` and `check` of models of 405 B to 1 T, of which only the headers are there.

    PYTHONPATH=. .venv/bin/python scripts/bench/large.py [--model DeepSeek-V3]... [--scheme W4A16]...
                                                         [--folder DIR]

The source has every header of the real model over files that are holes; the quantized checkpoint has those
that `vexport quantize` would write. `check` reads its numbers from one random buffer in the place of the
files, sound ones for scales: what it takes is all but the reading, whose bytes are named. Seconds are of the
processor, one thread; memory is the largest resident set. Linux only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sizes import watched

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
    write_config(index, plan, folder, "config.json")


def check(checkpoint: Path) -> str:
    """Check a checkpoint's headers and random numbers."""
    import vexport.checks

    vexport.checks.Reader = RandomReader  # type: ignore[attr-defined]
    findings = check_checkpoint(str(checkpoint)).findings
    errors = {finding.check for finding in findings if finding.severity == "error"} - {"tokenizer"}
    return (
        f"{RandomReader.bytes_read / 1e9:.1f} GB asked for, {len(errors)} families with errors {errors or ''}"
    )


def main(models: Sequence[str], schemes: Sequence[str], folder: Path) -> None:
    """Print a row for each call, each in a process of its own."""
    for model in models:
        source = folder / model
        if not (source / "config.json").is_file():
            save_headers(model, source)
        for scheme in schemes:
            quantized = folder / f"{model}-{scheme}"
            if not quantized.is_dir():
                save_quantized(source, quantized, scheme)
            command = ["-m", "vexport", "plan", str(source), "--scheme", scheme, "--quiet"]
            measured(f"plan {model} --scheme {scheme}", command, os.devnull)
            measured(f"check {model} {scheme}", [__file__, "--checked", str(quantized)], None)


def measured(title: str, arguments: Sequence[str], answer: str | None) -> None:
    """Print what a call of Python takes; its answer goes to a file, or is printed too."""
    print(f"| {title}", end=" | ", flush=True)
    with Path(answer or os.devnull).open("w") as stream:
        process = subprocess.Popen([sys.executable, *arguments], stdout=stream if answer else None)
        memory, usage = watched(process)
    print(f"exit code {process.returncode}", end="")
    print(f" | {usage.ru_utime + usage.ru_stime:.1f} s | {memory / 1e6:.0f} MB |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(CONFIGS))
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--checked", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.checked:
        print(check(given.checked), end=", ", flush=True)
        raise SystemExit
    with tempfile.TemporaryDirectory() as temporary:
        main(given.model or LARGE, given.scheme or ["W4A16"], given.folder or Path(temporary))
