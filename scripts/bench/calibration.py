"""Compare time and peak memory of calibration with a bare forward over the same tokens.

    .venv/bin/python scripts/bench/calibration.py [--samples 32] [--tokens 512] [--scheme NVFP4]

The model is a Llama of about 100 million random weights in bf16, written to a temporary folder.
`bare` has the whole model in memory and runs its forward sample by sample. Its loading time does
not count. `vexport` is the whole of `calibrate`, from the checkpoint on disk to the ranges. `peer`
is llm-compressor's `oneshot` with the sequential pipeline, if scripts/bench/setup-peer has made
.venv-peer. Each runs in a separate process. vexport and the peer run a few samples first, so that
imports and the first use of kernels do not count. Rounds alternate, and the fastest counts. On a
machine that is busy with other work compare CPU seconds, with OMP_NUM_THREADS=1. Memory is the peak
of the process, including its libraries.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from measure import PEER, Ran, random_llama, spent, timed

VOCABULARY = 32000
# The bound on the time of calibration, as a multiple of a bare forward.
BOUND = 1.3
Rows = list[list[int]]


def run_bare(folder: Path, rows: Rows, scheme: str) -> Callable[[], object]:
    """Run the forward of the whole model, sample by sample."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def run(rows: Rows) -> None:
        for row in rows:
            model.base_model(input_ids=torch.tensor([row]), use_cache=False)

    run(rows[:1])
    return partial(run, rows)


def run_vexport(folder: Path, rows: Rows, scheme: str) -> Callable[[], object]:
    """Run calibration, beginning with the files."""
    from vexport.calibration import Samples, calibrate
    from vexport.calibration.walk import LayerWalk
    from vexport.names import Folder
    from vexport.plan.source import plan_source, scheme_rules
    from vexport.scenario import Planning

    rules = scheme_rules(Planning(scheme=scheme, observer="memoryless_minmax"))

    def run(rows: Rows) -> None:
        samples = Samples(token_ids=tuple(map(tuple, rows)), rows=tuple(range(1, len(rows) + 1)))
        index, plan = plan_source(Folder.at(folder), rules)
        calibrate(LayerWalk(index), plan, samples)

    run(rows[:4])
    return partial(run, rows)


def run_peer(folder: Path, rows: Rows, scheme: str) -> Callable[[], object]:
    """Run the peer's oneshot on the same rows."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    return partial(
        oneshot,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        dataset=Dataset.from_dict(
            {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        ),
        recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
        pipeline="sequential",
    )


RUNS: Mapping[str, Callable[[Path, Rows, str], Callable[[], object]]] = {
    "bare": run_bare,
    "vexport": run_vexport,
    "peer": run_peer,
}


def measure(what: str, folder: Path, options: argparse.Namespace) -> Ran:
    """Measure a run in a separate process. Its seconds exclude imports."""
    python = PEER if what == "peer" else sys.executable
    sizes = ("--samples", options.samples, "--tokens", options.tokens, "--scheme", options.scheme)
    ran = timed(python, __file__, "--run", what, "--folder", folder, *sizes)
    ran.seconds, ran.cpu = ran.answer["seconds"], ran.answer["cpu"]
    return ran


def main() -> None:
    """Measure all and print a table, or measure a single run and print its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--scheme", default="NVFP4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        draw = random.Random(0)
        rows = [
            [draw.randrange(3, VOCABULARY) for _ in range(options.tokens)]
            for _ in range(options.samples)
        ]
        print(json.dumps(spent(RUNS[options.run](options.folder, rows, options.scheme))))
        return
    runs: dict[str, list[Ran]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = random_llama(
            Path(name) / "llama",
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        for number in range(options.rounds):
            for what in RUNS:
                if what != "peer" or PEER.exists() and number == 0:
                    runs.setdefault(what, []).append(measure(what, folder, options))
    fastest = {what: min(rounds, key=lambda ran: ran.seconds) for what, rounds in runs.items()}
    bare = fastest["bare"]
    print(f"{options.samples} samples of {options.tokens} tokens, {options.scheme}; bound {BOUND}")
    for what, ran in fastest.items():
        print(
            f"{what:8} {ran.seconds:7.2f} s {ran.seconds / bare.seconds:6.2f} x bare, "
            f"CPU {ran.cpu:7.2f} s {ran.cpu / bare.cpu:6.2f} x, memory {ran.megabytes:5.0f} MB"
        )


if __name__ == "__main__":
    main()
