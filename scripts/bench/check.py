"""Time of `vexport check` next to the time it takes to read the same files.

    .venv/bin/python scripts/bench/check.py [--scheme NVFP4A16]... [--layers 22] [--repeats 3] [--folder DIR]

The checkpoint is what `vexport quantize` makes of the synthetic Llama of scripts/bench/quantize.py (1.1 B
parameters in 4 shards), once in DIR. Files are in the page cache; the limit is `cat` of all shards. The
fastest of the repeats counts, memory is the largest resident set. Linux only.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quantize import LAYERS, make_source, timed

SCHEMES = ("NVFP4A16", "W4A16", "FP8_BLOCK")
COLUMNS = ("GB", "check s", "CPU s", "MB", "cat s", "of cat")


def make(folder: Path, scheme: str, layers: int) -> Path:
    """The checkpoint, written unless it is there."""
    source, out = make_source(folder / f"llama-{layers}", layers), folder / f"check-{layers}-{scheme}"
    if not out.exists():
        timed([sys.executable, "-m", "vexport", "quantize", source, out, "--scheme", scheme, "--quiet"])
    return out


def measure(checkpoint: Path, repeats: int) -> list[float]:
    """The check and the reading in turns; a checkpoint that does not pass ends it all."""
    shards, ran, read = sorted(checkpoint.glob("*.safetensors")), [], []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(["cat", *shards], stdout=subprocess.DEVNULL, check=True)
        read.append(time.perf_counter() - start)
        ran.append(timed([sys.executable, "-m", "vexport", "check", checkpoint, "--quiet"]))
    seconds, gigabytes = min(run.seconds for run in ran), sum(shard.stat().st_size for shard in shards) / 1e9
    cpu, memory = min(run.cpu for run in ran), max(run.megabytes for run in ran)
    return [gigabytes, seconds, cpu, memory, min(read), seconds / min(read)]


def main() -> None:
    """Measure every scheme and print the table."""
    parser = argparse.ArgumentParser(description="Time of vexport check next to that of reading the files.")
    parser.add_argument("--scheme", action="append", help="A scheme; repeatable.")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "vexport-bench")
    options = parser.parse_args()
    print(" " * 12 + "".join(f"{name:>9}" for name in COLUMNS))
    for scheme in options.scheme or SCHEMES:
        cells = measure(make(options.folder, scheme, options.layers), options.repeats)
        print(f"{scheme:12}" + "".join(f"{cell:9.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
