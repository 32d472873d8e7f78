"""Time and peak memory of calibration against a bare forward over the same tokens, and against the peer.

    .venv/bin/python scripts/bench/calibration.py [--samples 32] [--tokens 512] [--scheme NVFP4]

The model is a Llama of about 100 million random weights in bf16, written to a temporary folder. `bare` has
the whole model in memory and runs its forward sample by sample, loading not counted; `vexport` is all of
`calibrate`, from the checkpoint on disk to the ranges; `peer` is llm-compressor's `oneshot` with the
sequential pipeline, when scripts/bench/setup-peer has made .venv-peer. Each is a process of its own, the
others run a few samples before, so that no import and no kernel's first use counts. Rounds alternate and the
fastest counts. On a machine that is busy with other work compare CPU seconds, with OMP_NUM_THREADS=1. Memory
is the peak during the run, after what the process had before: libraries and, for bare and peer, the model.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
TOKENIZER = ROOT / "scenarios" / "demo" / "model"
VOCABULARY = 32000
# The bound on calibration over a bare forward.
BOUND = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The fastest of the rounds and the memory that it took."""

    what: str
    seconds: float
    cpu_seconds: float
    before_mb: float
    peak_mb: float


def write_model(folder: Path) -> None:
    """A Llama of 12 layers and 110 million weights, tied embeddings included."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER.glob("tokenizer*"):  # the peer asks for one, though rows are token ids
        shutil.copyfile(file, folder / file.name)


def token_ids(samples: int, tokens: int) -> list[list[int]]:
    """Random token ids, the same in every process."""
    draw = random.Random(0)
    return [[draw.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(samples)]


def run_bare(folder: Path, ids: list[list[int]], scheme: str) -> Callable[[], None]:
    """The forward of the whole model, sample by sample."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run() -> None:
        with torch.no_grad():
            for row in ids:
                model.base_model(input_ids=torch.tensor([row]), use_cache=False)

    with torch.no_grad():
        model.base_model(input_ids=torch.tensor([ids[0]]), use_cache=False)
    return run


def run_vexport(folder: Path, ids: list[list[int]], scheme: str) -> Callable[[], None]:
    """Calibration, from the files on."""
    from vexport.calibration import Samples, calibrate
    from vexport.calibration.walk import LayerWalk
    from vexport.plan.source import plan_source, rules_for
    from vexport.records import PlanRequest

    rules = rules_for(PlanRequest(scheme=scheme, observer="memoryless_minmax"))

    def run_rows(rows: list[list[int]]) -> None:
        samples = Samples(token_ids=tuple(map(tuple, rows)), rows=tuple(range(1, len(rows) + 1)))
        index, plan = plan_source(str(folder), rules)
        found = calibrate(LayerWalk(index), plan, samples)
        assert len(found.ranges) == sum(len(group.members) for group in plan.groups)

    run_rows(ids[:4])
    return partial(run_rows, ids)


def run_peer(folder: Path, ids: list[list[int]], scheme: str) -> Callable[[], None]:
    """The peer's oneshot on the same rows."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import (
        QuantizationModifier,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})

    def run() -> None:
        oneshot(
            model=model,
            dataset=rows,
            recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
            num_calibration_samples=len(ids),
            max_seq_length=len(ids[0]),
            pipeline="sequential",
        )

    return run


RUNS: dict[str, Callable[[Path, list[list[int]], str], Callable[[], None]]] = {
    "bare": run_bare,
    "vexport": run_vexport,
    "peer": run_peer,
}


def resident_mb(which: str) -> float:
    """Resident memory of this process in MB: VmRSS now, VmHWM at its peak since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1000


def measure_here(arguments: argparse.Namespace) -> Measured:
    """One run in this process, after the imports."""
    ids = token_ids(arguments.samples, arguments.tokens)
    run = RUNS[arguments.run](arguments.folder, ids, arguments.scheme)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before, start, cpu = resident_mb("VmRSS"), time.perf_counter(), time.process_time()
    run()
    return Measured(
        what=arguments.run,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu,
        before_mb=before,
        peak_mb=resident_mb("VmHWM"),
    )


def measure(what: str, folder: Path, arguments: argparse.Namespace) -> Measured:
    """One run in a process of its own."""
    python = PEER if what == "peer" else Path(sys.executable)
    command = [python, HERE, "--run", what, "--folder", folder, "--samples", arguments.samples]
    command += ["--tokens", arguments.tokens, "--scheme", arguments.scheme]
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if ran.returncode:
        raise SystemExit(f"{what}: {ran.stderr[-2000:]}")
    return Measured(**json.loads(ran.stdout.splitlines()[-1]))


def main() -> None:
    """Measure all and print a table, or one run and print its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--scheme", default="NVFP4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(asdict(measure_here(arguments))))
        return
    results = measure_all(arguments)
    bare = results[0]
    print(f"{arguments.samples} samples of {arguments.tokens} tokens, {arguments.scheme}; bound {BOUND}")
    for one in results:
        print(
            f"{one.what:8} {one.seconds:7.2f} s {one.seconds / bare.seconds:6.2f} x bare, "
            f"CPU {one.cpu_seconds:7.2f} s {one.cpu_seconds / bare.cpu_seconds:6.2f} x, "
            f"memory {one.before_mb:5.0f} to {one.peak_mb:5.0f} MB"
        )


def measure_all(arguments: argparse.Namespace) -> list[Measured]:
    """The fastest round of each."""
    kinds = [what for what in RUNS if what != "peer" or PEER.exists()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        rounds = [
            measure(what, folder, arguments)
            for number in range(arguments.rounds)
            for what in kinds
            if what != "peer" or number == 0
        ]
    return [min((one for one in rounds if one.what == what), key=lambda one: one.seconds) for what in kinds]


if __name__ == "__main__":
    main()
