"""Measures vexport on a GPU, next to the CPU: one command for a machine with CUDA and torch.

    .venv/bin/python scripts/gpu [--out gpu] [--stage NAME]... [--device cuda]

Stages of ten minutes at most, every one a process of its own: `device` (card, versions, peaks),
`kernels` (sums and codes of one weight), `pipeline` (gptq and refit of the demo and of 1.1 B random weights:
KL, time, memory), `decode` (packed weights by torch on the device), `vllm` (load and eval by real kernels),
`peer` (llm-compressor's GPTQ on the same rows). A row says why something is skipped. The table is in
OUT/gpu.json and OUT/gpu.md. `--device cpu` rehearses all of it with a small model.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from rows import FAILED, Row, Sizes, markdown  # noqa: E402

STAGES = ("device", "kernels", "pipeline", "decode", "vllm", "peer")
LIMIT_SECONDS = 600


def run_here(stage: str, device: str, folder: Path) -> None:
    """Print the rows of a stage as they come, in this process."""
    import stages

    for row in getattr(stages, stage)(device, Sizes.of(device), folder):
        print(json.dumps(asdict(replace(row, stage=stage))), flush=True)


def run_apart(stage: str, device: str, folder: Path) -> list[Row]:
    """The rows of a stage in a process of its own, and one more where it fails or takes too long."""
    words = [Path(__file__).parent, "--here", stage, "--device", device, "--out", folder]
    reason, log = "", folder / f"{stage}.log"
    with log.open("w") as errors, (folder / f"{stage}.jsonl").open("w+") as lines:
        try:
            command = [sys.executable, *map(str, words)]
            code = subprocess.run(command, stdout=lines, stderr=errors, timeout=LIMIT_SECONDS).returncode
        except subprocess.TimeoutExpired:
            reason = f"more than {LIMIT_SECONDS} s"
        else:
            last = log.read_text().strip().splitlines()[-1:]
            reason = f"exit {code}: {' '.join(last)[:200]} ({log.name})" if code else ""
        lines.seek(0)
        rows = [Row(**json.loads(line)) for line in lines if line.startswith('{"name"')]
    return [*rows, *([Row(FAILED, note=reason, stage=stage)] if reason else [])]


def main() -> int:
    """Run the stages and write the table; 1 where one failed or missed its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="A device of torch; cpu rehearses.")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--stage", action="append", choices=STAGES, help="Only this stage; repeatable.")
    parser.add_argument("--here", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.here:
        run_here(options.here, options.device, folder)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    rows = list[Row]()
    for stage in options.stage or STAGES:
        print(f"{stage} ...", file=sys.stderr, flush=True)
        rows += run_apart(stage, options.device, folder)
        (folder / "gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (folder / "gpu.md").write_text(markdown(rows))
    print(markdown(rows), end="")
    return 1 if any(row.is_bad for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
