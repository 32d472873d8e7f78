"""Compare the speed of the observers' searches over weights with llm-compressor's.

    .venv/bin/python scripts/bench/observers.py [--rows 8192] [--columns 4096] [--peer-rows 256]

Each row of the table is an observer and a scheme on random heavy-tailed bf16 weights. The speed is
in MB of bf16 per second, measured from the weight to its qparams. The fastest of some repeats
counts, after a first call that compiles. The peer is slow, so it has fewer rows. Each side runs in
a separate process, the peer in .venv-peer (scripts/bench/setup-peer). Without .venv-peer its column
is empty.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import torch
from measure import PEER, spent, timed

MB = 1e6


# Observers, with the presets of the weights that they observe.
CASES = (
    ("memoryless_mse", "NVFP4"),
    ("nvfp4_expanded_mse", "NVFP4"),
    *(
        ("memoryless_mse", scheme)
        for scheme in ("W4A16", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "FP8")
    ),
    ("imatrix_mse", "W4A16"),
    ("imatrix_mse", "NVFP4"),
)


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Return random bf16 weights with an outlier in a hundred, made a few rows at a time."""
    torch.manual_seed(0)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    for start in range(0, rows, 256):
        part = weight[start : start + 256]
        values = torch.randn(part.shape) * 0.02
        part.copy_(torch.where(torch.rand(part.shape) > 0.99, values * 8, values))
    return weight


def observation(
    name: str, scheme: str, weight: torch.Tensor, *, peer: bool
) -> Callable[[], object]:
    """Return the call that is timed: a new observer sees the weight and returns its qparams."""
    from compressed_tensors.quantization import preset_name_to_scheme

    if peer:
        from llmcompressor.observers import Observer
    else:
        from vexport.observers import Observer

    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    module = torch.nn.Linear(weight.shape[1], 1, bias=False)
    inputs = torch.randn(16, weight.shape[1])

    def observe() -> object:
        observer = Observer.load_from_registry(name, base_name="weight", args=args)
        if name == "imatrix_mse":
            observer.attach(module)
            module(inputs)
            observer.detach(module)
        observer(weight)
        return observer.get_qparams()

    return observe


def speeds(rows: int, columns: int, repeats: int, *, peer: bool) -> list[float]:
    """Return MB/s for every case, of the fastest call after a first call that does not count."""
    weight, found = heavy_tailed(rows, columns), []
    for case in CASES:
        observe = observation(*case, weight, peer=peer)
        seconds = [spent(observe)["seconds"] for _ in range(repeats + 1)]
        found.append(weight.nbytes / MB / min(seconds[1:]))
    return found


def main() -> None:
    """Run the comparison, or a single side of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows of our weight (default 8192)")
    parser.add_argument(
        "--columns", type=int, default=4096, help="columns of both weights (default 4096)"
    )
    parser.add_argument(
        "--peer-rows", type=int, default=256, help="rows of the peer's weight (default 256)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats of ours (default 3)")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(
            json.dumps(
                speeds(options.rows, options.columns, options.repeats, peer=options.side == "peer")
            )
        )
        return
    side = (__file__, "--columns", options.columns, "--side")
    ours = timed(
        sys.executable, *side, "ours", "--rows", options.rows, "--repeats", options.repeats
    ).answer
    theirs: Sequence[float | None] = [None] * len(CASES)
    if PEER.exists():
        theirs = timed(PEER, *side, "peer", "--rows", options.peer_rows, "--repeats", 1).answer
    print(f"{'observer':20}{'scheme':16}{'MB/s':>9}{'peer MB/s':>11}{'ratio':>8}")
    for (name, scheme), own, peer in zip(CASES, ours, theirs, strict=True):
        compared = f"{peer:11.1f}{own / peer:8.1f}" if peer else f"{'-':>11}{'-':>8}"
        print(f"{name:20}{scheme:16}{own:9.1f}{compared}")


if __name__ == "__main__":
    main()
