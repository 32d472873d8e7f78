"""Compare the dry load by vLLM's CPU build with the dry load by its CUDA wheel: kernels and
refusals.

    .venv/bin/python scripts/wheel_kernels.py WHEEL_PYTHON [CHECKPOINT]...

WHEEL_PYTHON is the interpreter of an environment with vLLM's CUDA wheel of the same version.
Without a CHECKPOINT the demo's model is quantized in every scheme. Every cell of capability and
tensor parallel size is compared, and each difference is printed; the exit code is 1 if there is
one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vexport.formats.schemes import all_schemes

DEMO = Path(__file__).resolve().parent.parent / "scenarios" / "demo"
CAPABILITIES, SIZES = "75,80,86,89,90,100,103,120", "1,2"
# What identifies a cell: checkpoint, kind of layer (empty for the whole checkpoint), size and
# capability.
Place = tuple[str, str, int, int]


def quantized(folder: Path) -> Iterator[Path]:
    """The demo's model in every scheme, rounded to nearest."""
    text = ("--calibration", DEMO / "calibration.jsonl", "--samples", 8, "--seq-len", 64)
    for scheme in all_schemes():
        out = folder / scheme.name
        words = ("quantize", DEMO / "model", out, "--scheme", scheme.name, "--rounding", "nearest")
        vexport(
            *words, "--no-verify", "--quiet", *(text if scheme.name in ("FP8", "NVFP4") else ())
        )
        yield out


def vexport(*words: object) -> None:
    """Run a command of vexport; a refusal of a checkpoint (1) is an answer as well."""
    ran = subprocess.run(
        [sys.executable, "-m", "vexport", *map(str, words)], capture_output=True, text=True
    )
    if ran.returncode not in (0, 1):
        sys.exit(ran.stderr)


def cells(
    checkpoints: Sequence[Path], answers: Path, *words: object
) -> dict[Place, tuple[str, str, str]]:
    """Status, precision and kernel of every cell; of a refused checkpoint the status alone."""
    vexport(
        "load",
        *checkpoints,
        "--dry",
        "--sm",
        CAPABILITIES,
        "--tp",
        SIZES,
        "-o",
        answers,
        "--quiet",
        *words,
    )
    reports: list[dict[str, Any]] = json.loads(answers.read_text())
    found: dict[Place, tuple[str, str, str]] = {}
    for report in reports:
        name = Path(report["checkpoint"]).name
        for kind, row in (("", report), *((row["name"], row) for row in report["rows"])):
            for cell in row["cells"]:
                place = (name, kind, cell["tp"], cell["sm"])
                found[place] = (cell["status"], cell["precision"], cell["kernel"])
    return found


def main() -> int:
    """Print what differs; 1 if something does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel_python", type=Path, help="The interpreter with vLLM's CUDA wheel.")
    parser.add_argument(
        "checkpoint", type=Path, nargs="*", help="Checkpoints to load [default: the demo's]."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = options.checkpoint or list(quantized(folder))
        start = time.monotonic()
        ours = cells(checkpoints, folder / "ours.json")
        wheels = cells(checkpoints, folder / "wheel.json", "--vllm-python", options.wheel_python)
    differing = sorted(
        place for place in ours.keys() | wheels.keys() if ours.get(place) != wheels.get(place)
    )
    for place in differing:
        checkpoint, kind, tp, sm = place
        print(f"{checkpoint} {kind or 'as a whole'}, tp {tp}, SM {sm}:")
        print(f"  here {ours.get(place)}, by the wheel {wheels.get(place)}")
    minutes = (time.monotonic() - start) / 60
    print(
        f"{len(differing)} of {len(ours)} cells of {len(checkpoints)} checkpoints differ "
        f"({minutes:.1f} min)"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
