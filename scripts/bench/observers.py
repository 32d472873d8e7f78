"""Speed of the observers' searches over weights, against llm-compressor's.

    .venv/bin/python scripts/bench/observers.py [--rows 8192] [--columns 4096] [--peer-rows 256]

Each row of the table is an observer and a scheme on random heavy-tailed bf16 weights: from the weight to its
qparams, MB of bf16 per second, the fastest of some repeats after a first one that compiles. The peer is slow,
so it has fewer rows; each side is a process of its own, the peer's in .venv-peer
(scripts/bench/setup-peer; without it that column is empty).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An observer on a scheme, and how many times the peer's speed is the goal."""

    observer: str
    scheme: str
    goal: int


SCHEMES: Mapping[str, Mapping[str, object]] = {
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "int4 group 128": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "int8 channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}
CASES = (
    Case(observer="memoryless_mse", scheme="NVFP4", goal=100),
    Case(observer="nvfp4_expanded_mse", scheme="NVFP4", goal=100),
    Case(observer="memoryless_mse", scheme="int4 group 128", goal=20),
    Case(observer="memoryless_mse", scheme="int8 channel", goal=20),
    Case(observer="memoryless_mse", scheme="fp8 channel", goal=20),
    Case(observer="memoryless_mse", scheme="fp8 block", goal=20),
    Case(observer="memoryless_mse", scheme="fp8 tensor", goal=20),
    Case(observer="imatrix_mse", scheme="int4 group 128", goal=20),
    Case(observer="imatrix_mse", scheme="NVFP4", goal=20),
)


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Random weights with one outlier in a hundred, bf16, made a few rows at a time."""
    torch.manual_seed(0)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    for start in range(0, rows, 256):
        part = weight[start : start + 256]
        values = torch.randn(part.shape) * 0.02
        part.copy_(torch.where(torch.rand(part.shape) > 0.99, values * 8, values))
    return weight


def observation(case: Case, weight: torch.Tensor, *, peer: bool) -> Callable[[], object]:
    """What is timed: a new observer sees the weight and answers with qparams."""
    from compressed_tensors.quantization import QuantizationArgs

    if peer:
        from llmcompressor.observers import Observer
    else:
        from vexport.observers import Observer

    scale_dtype = torch.float8_e4m3fn if case.scheme == "NVFP4" else None
    args = QuantizationArgs(**SCHEMES[case.scheme], scale_dtype=scale_dtype)
    module = torch.nn.Linear(weight.shape[1], 1, bias=False)
    inputs = torch.randn(16, weight.shape[1])

    def observe() -> object:
        observer = Observer.load_from_registry(case.observer, base_name="weight", args=args)
        if case.observer == "imatrix_mse":
            observer.attach(module)
            module(inputs)
            observer.detach(module)
        observer(weight)
        return observer.get_qparams()

    return observe


def seconds(observe: Callable[[], object], repeats: int) -> float:
    """The fastest of some calls after one that is not counted."""
    observe()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        observe()
        taken.append(time.perf_counter() - start)
    return min(taken)


def speeds(rows: int, columns: int, repeats: int, *, peer: bool) -> list[float]:
    """MB/s of every case."""
    weight = heavy_tailed(rows, columns)
    megabytes = weight.nbytes / MB
    return [megabytes / seconds(observation(case, weight, peer=peer), repeats) for case in CASES]


def measured(python: Path, *options: object) -> list[float]:
    """The same in a process of its own."""
    words = [str(word) for word in (python, Path(__file__).resolve(), *options)]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def table(ours: Sequence[float], theirs: Sequence[float | None]) -> str:
    """The measurements as aligned columns."""
    lines = [f"{'observer':20}{'scheme':16}{'MB/s':>9}{'peer MB/s':>11}{'ratio':>8}{'goal':>6}"]
    for case, own, peer in zip(CASES, ours, theirs, strict=True):
        compared = f"{peer:11.1f}{own / peer:8.1f}" if peer else f"{'-':>11}{'-':>8}"
        lines.append(f"{case.observer:20}{case.scheme:16}{own:9.1f}{compared}{case.goal:6}")
    return "\n".join(lines)


def main() -> None:
    """Run the comparison, or one side of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows of our weight (default 8192)")
    parser.add_argument("--columns", type=int, default=4096, help="columns of both weights (default 4096)")
    parser.add_argument("--peer-rows", type=int, default=256, help="rows of the peer's weight (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of ours (default 3)")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        found = speeds(options.rows, options.columns, options.repeats, peer=options.side == "peer")
        print(json.dumps(found))
        return
    columns = ("--columns", options.columns)
    sizes = ("--rows", options.rows, "--repeats", options.repeats)
    ours = measured(Path(sys.executable), "--side", "ours", *sizes, *columns)
    theirs: Sequence[float | None] = [None] * len(CASES)
    if PEER.exists():
        theirs = measured(PEER, "--side", "peer", "--rows", options.peer_rows, "--repeats", 1, *columns)
    print(table(ours, theirs))


if __name__ == "__main__":
    main()
