"""Measure vexport on a GPU, and compare with the CPU. Needs a machine with CUDA and torch.

    .venv/bin/python scripts/gpu [--out gpu] [--stage NAME]... [--device cuda]

Each stage runs in a separate process and may take ten minutes, `rounding` five:

- `device`: the card, the driver and the versions of packages.
- `vllm`: loads every scheme with vLLM's real kernels, compares them with the kernels that the
  dry load expects, and evaluates two schemes.
- `kernels`: second moments of inputs, and codes of a weight.
- `pipeline`: calibration, smoothing, gptq and refit of the demo: codes and KL.
- `rounding`: the Triton kernel that rounds columns, and gptq and refit of two models of random
  weights: 0.1 B on the device and the CPU (codes, KL), 1.1 B on the device (time, memory).

The rows of a stage are written to OUT/STAGE.jsonl as soon as they are measured. The table is
written to OUT/gpu.json and OUT/gpu.md. A row that is skipped has the reason. `--device cpu`
rehearses all stages with a small model.
"""

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Folders that the stages import from: vexport, their modules, and modules that scripts and
# benchmarks share.
PATHS = (HERE.parent.parent, HERE, HERE.parent, HERE.parent / "bench")
sys.path[:0] = map(str, PATHS)

from process import run_here  # noqa: E402
from rows import FAILED, Row, markdown  # noqa: E402

STAGES = ("device", "vllm", "kernels", "pipeline", "rounding")
LIMIT_SECONDS = {stage: 300 if stage == "rounding" else 600 for stage in STAGES}


def run_apart(
    stage: str, device: str, folder: Path, checkpoints: tuple[Path, ...] = ()
) -> list[Row]:
    """Run a stage in a separate process and return its rows.

    There is an additional row if the stage fails or takes too long.
    """
    reason, log, lines = "", folder / f"{stage}.log", folder / f"{stage}.jsonl"
    # Imports take longer than the rehearsal of a stage. CUDA may not be used before a fork.
    forks, spawns = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    forks.set_forkserver_preload(["stages"])
    process = (forks if device == "cpu" else spawns).Process(
        target=run_here, args=(stage, device, folder, checkpoints)
    )
    process.start()
    limit = LIMIT_SECONDS[stage]
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        reason = f"more than {limit} s"
    elif process.exitcode:
        last = log.read_text().strip().splitlines()[-1:]
        reason = f"exit {process.exitcode}: {' '.join(last)[:200]} ({log.name})"
    rows = [
        Row(**json.loads(line))
        for line in lines.read_text().splitlines()
        if line.startswith('{"name"')
    ]
    return [*rows, *([Row(FAILED, note=reason, stage=stage)] if reason else [])]


def main() -> int:
    """Run the stages and write the table. Return 1 if a stage failed or missed its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="A device of torch; cpu rehearses.")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="Only this stage; repeatable."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        default=[],
        help="A checkpoint that vLLM loads besides the demo's; repeatable.",
    )
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [*map(str, PATHS), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    rows = list[Row]()
    for stage in options.stage or STAGES:
        print(f"{stage} ...", file=sys.stderr, flush=True)
        rows += run_apart(stage, options.device, folder, tuple(options.checkpoint))
        (folder / "gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (folder / "gpu.md").write_text(markdown(rows))
    print(markdown(rows), end="")
    return 1 if any(row.is_bad for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
