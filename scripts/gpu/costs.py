"""What a device reaches, the least work of a stage, and the memory that the documents promise."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rows import Peaks, Sizes

from vexport.calibration.weights import STAGED_BYTES
from vexport.records import Plan
from vexport.rounding.settings import waiting_bytes


def seconds_of(call: Callable[[], object], device: str, repeats: int = 3) -> float:
    """The fastest of some calls, after one that warms up, when the device has done them."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def peaks_of(device: str, sizes: Sizes) -> Peaks:
    """What products and copies on the device reach."""
    side = 2 * sizes.matrix
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32  # which many a CPU lacks
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    buffer = torch.empty(sizes.bandwidth_bytes, dtype=torch.uint8, device=device)
    products = 2 * side**3 / seconds_of(lambda: matrix @ matrix, device)
    return Peaks(products, 2 * sizes.bandwidth_bytes / seconds_of(buffer.clone, device))


def rounding_cost(plan: Plan, rows: Sequence[int], *, drift: bool) -> tuple[float, float]:
    """Operations: forwards of both streams, columns passed on, half of H, and of a refit the drift.

    Bytes: every row reads the 16-bit weights in both streams and reads and writes the sums; each weight is
    read and written in float32 once.
    """
    work = moved = 0.0
    for group in plan.groups:
        columns = group.members[0].in_features
        work += (3 if drift else 1) * sum(rows) * columns**2
        moved += (16 if drift else 8) * len(rows) * columns**2
        for member in group.members:
            work += member.out_features * columns * (4 * sum(rows) + columns)
            moved += member.out_features * columns * (4 * len(rows) + 8)
    return work, moved


def look_back_cost(plan: Plan, rows: Sequence[int]) -> tuple[float, float]:
    """Three products of a token and a weight: up, up again, back. For each a row reads the weights."""
    weights = sum(one.out_features * one.in_features for group in plan.groups for one in group.members)
    return 6.0 * weights * sum(rows), 6.0 * weights * len(rows)


def promised_bytes(
    plan: Plan, tokens: int, sizes: Sizes, *, on_card: bool
) -> Mapping[str, tuple[float, str]]:
    """The memory that quantizing takes by the documents, on the host and on the card, and of what it is."""
    weights = [sum(one.out_features * one.in_features for one in group.members) for group in plan.groups]
    if all(group.rounding == "nearest" for group in plan.groups):
        return {"host": (2.5 * max(weights), "the largest group and its bytes")}
    around, states = 4 * sizes.vocabulary * sizes.hidden, 4 * tokens * sizes.hidden
    widest = max(group.members[0].in_features for group in plan.groups)
    layer = 2 * sum(weights) / sizes.layers
    rounding = waiting_bytes(plan.groups, tokens) + 20 * widest**2 + 8 * max(weights)
    if not on_card:
        return {
            "host": (layer + around + states + rounding, "a layer, states, waiting rows, H, what is around")
        }
    return {
        "host": (states + STAGED_BYTES, "states, and a buffer"),
        "card": (3 * layer + around + rounding, "three layers, waiting rows, H, what is around"),
    }


def host_bytes(name: str) -> int:
    """A line of this process's status, in bytes: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_host_peak() -> int:
    """Begin to take the peak of the memory anew; what is taken now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return host_bytes("VmRSS")
