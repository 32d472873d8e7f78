"""Speed of the observers' searches over weights, against llm-compressor's.

    .venv/bin/python scripts/bench/observers.py [--rows 8192] [--columns 4096] [--peer-rows 256]

Each row of the table is an observer and a scheme on random heavy-tailed bf16 weights: from the weight to its
qparams, MB of bf16 per second, the fastest of some repeats after a first one that compiles. The peer is slow,
so it has fewer rows; both are measured in turns, in processes of their own, the peer's in .venv-peer
(scripts/bench/setup-peer; without it that column is empty).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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


def work(rows: int, columns: int, repeats: int, *, peer: bool) -> None:
    """Measure the cases named on stdin by their index, and answer each with a line of JSON."""
    weight = heavy_tailed(rows, columns)
    for line in sys.stdin:
        observe = observation(CASES[int(line)], weight, peer=peer)
        speed = weight.nbytes / MB / seconds(observe, repeats)
        print(json.dumps({"speed": speed}), flush=True)


class Worker:
    """A process that measures; it is asked one case at a time."""

    def __init__(self, python: Path, kind: str, rows: int, columns: int, repeats: int) -> None:
        self.python = python
        command = [str(python), str(Path(__file__).resolve()), "--worker", kind]
        sizes = ["--rows", str(rows), "--columns", str(columns), "--repeats", str(repeats)]
        self.process = subprocess.Popen(
            [*command, *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, case: int) -> dict[str, float | None]:
        """Speed in MB/s of that case; RuntimeError when the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, float | None] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.python}: ended with {self.process.wait()}; its error is above")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def compare(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all cases, ours and the peer's in turns."""
    ours = Worker(Path(sys.executable), "ours", options.rows, options.columns, options.repeats)
    peer = Worker(PEER, "peer", options.peer_rows, options.columns, 1) if PEER.exists() else None
    found: list[dict[str, object]] = []
    for index, case in enumerate(CASES):
        print(f"{index + 1}/{len(CASES)} {case.observer} {case.scheme}", file=sys.stderr, flush=True)
        mine = ours.measure(index)
        theirs = peer.measure(index)["speed"] if peer else None
        speed = mine["speed"] or 0.0
        ratio = speed / theirs if theirs else None
        found.append({**asdict(case), **mine, "peer_speed": theirs, "ratio": ratio})
    ours.close()
    if peer:
        peer.close()
    return found


def table(found: list[dict[str, object]]) -> str:
    """The measurements as aligned columns."""
    head = ("observer", "scheme", "MB/s", "peer MB/s", "ratio", "goal")
    keys = ("observer", "scheme", "speed", "peer_speed", "ratio", "goal")
    cells = [head, *([_cell(row.get(key)) for key in keys] for row in found)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ([text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "-" if value is None else str(value)


def main() -> int:
    """Run the comparison, or the worker that it starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows of our weight (default 8192)")
    parser.add_argument("--columns", type=int, default=4096, help="columns of both weights (default 4096)")
    parser.add_argument("--peer-rows", type=int, default=256, help="rows of the peer's weight (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of ours (default 3)")
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rows, options.columns, options.repeats, peer=options.worker == "peer")
        return 0
    print(table(compare(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
