"""Estimate how long the calibration of a plan takes on the CPU, before it begins.

The estimate is the number of operations of all steps, divided by the measured speed of this
machine's CPUs (`vexport/numerics/speed.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vexport.formats.plan import FusionGroup, Plan
from vexport.plan.rules import (
    FEW_BITS,
    SMOOTHING_ROWS,
    TOKEN_WEIGHT_ROWS,
    enough_tokens,
    rounds_with_text,
)
from vexport.records.calibration import CALIBRATE, GRADIENTS, ROUND

# Time per weight to search scales and to round column by column, as the number of float32
# operations that a matrix product does in this time. `calibration_work` adds the matrix products
# with the moments of the inputs. Measured on a Xeon with AVX-512 (one thread, 86 GFLOPS, 6 layers
# of SmolLM2-135M in W4A16_G64): a layer of 3.5 million weights took 0.7 s in all with 256 tokens.
# With 2,048 tokens it took 1.24 s, and the estimate is 1.28 s.
ROUNDING_PER_WEIGHT = 14_000
# Share of the CPU's measured speed that calibration reaches. SmolLM2-135M in W4A16_G64 on two cores
# took 108 s with 16 samples of 256 tokens, 155 s with 36 of 256, and 170 s with 20 of 512. The
# estimates are 93, 157 and 181 s.
EFFICIENCY = 0.42
# Text for a first try: at least this many samples, of at most this many tokens.
TRIAL_SAMPLES, TRIAL_SEQ_LEN = 16, 256
# Shorter calibrations get no line about their duration.
LONG_SECONDS = 120.0
# A slow CPU, in operations per second. If even this CPU would not take long, the speed of the
# machine's CPU is not measured.
SLOW_FLOPS = 2e9


def calibration_work(plan: Plan, *, samples: int, seq_len: int) -> Mapping[str, float]:
    """Return the floating-point operations of each step of calibration, by the step's name.

    The gradient step is always included, even if the plan skips it (see `calibration_steps`).
    """
    tokens = samples * seq_len
    weights = sum(_weights(group) for group in plan.groups)
    # Embeddings and the output head. They count once, because most small models share them.
    head = max(plan.parameters - weights, 0)
    rows = min(samples, SMOOTHING_ROWS if plan.smoothing else TOKEN_WEIGHT_ROWS)
    # A forward pass, then a second forward pass and a backward pass. The head is not part of the
    # first forward pass. Each pass takes 2 operations for each weight and token.
    gradients = rows * seq_len * (3 * 2 * weights + 2 * 2 * head)
    forward = 2 * weights * tokens
    if not rounds_with_text(plan):
        return {GRADIENTS: gradients, CALIBRATE: forward}
    rounded = [group for group in plan.groups if group.rounding != "nearest"]
    streams = 2 if any(group.rounding == "refit" for group in rounded) else 1
    # The moments of the inputs are symmetric, so only half of them is computed. A refit also needs
    # the products between the inputs of the original and of the quantized model.
    moments = sum(
        _columns(group) ** 2 * (3 if group.rounding == "refit" else 1) for group in rounded
    )
    rounding = sum(
        _weights(group) * (ROUNDING_PER_WEIGHT + 2 * streams * _columns(group)) for group in rounded
    )
    return {GRADIENTS: gradients, ROUND: streams * forward + moments * tokens + rounding}


def calibration_steps(plan: Plan) -> Sequence[str]:
    """Return the names of the steps that a plan takes, in their order."""
    refits = any(group.rounding == "refit" for group in plan.groups)
    gradients = (GRADIENTS,) if plan.smoothing or refits else ()
    return (*gradients, ROUND if rounds_with_text(plan) else CALIBRATE)


def calibration_seconds(plan: Plan, *, samples: int, seq_len: int, flops: float) -> float:
    """Return the expected seconds of all steps, with `flops` operations in a second."""
    work = calibration_work(plan, samples=samples, seq_len=seq_len)
    return sum(work[name] for name in calibration_steps(plan)) / (flops * EFFICIENCY)


def with_text(plan: Plan) -> Plan:
    """Return the plan as it would be with calibration text: weights below 8 bits are refitted."""
    groups = tuple(
        replace(group, rounding="refit")
        if group.rounding == "nearest" and group.scheme.args.weights.num_bits < FEW_BITS
        else group
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def duration_line(plan: Plan, *, samples: int, seq_len: int, flops: float) -> str | None:
    """Return how long calibration takes on the CPU and how to shorten it, or None if it is short.

    `flops` is the speed of the CPU.
    """
    seconds = calibration_seconds(plan, samples=samples, seq_len=seq_len, flops=flops)
    if seconds < LONG_SECONDS:
        return None
    line = f"calibration will take {about_minutes(seconds)} on this CPU"
    few, short = _trial_size(plan, samples=samples, seq_len=seq_len)
    trial = calibration_seconds(plan, samples=few, seq_len=short, flops=flops)
    if trial > seconds / 2:
        return line
    return (
        f"{line}; a first try with {few} samples of {short} tokens takes {about_minutes(trial)} "
        f"(`--samples {few} --seq-len {short}`, or these keys of a scenario's calibration)"
    )


def _trial_size(plan: Plan, *, samples: int, seq_len: int) -> tuple[int, int]:
    """Return the number of samples and their length for a first try.

    There are enough tokens for the columns of the widest weight that is rounded with text.
    """
    rounded = [group for group in plan.groups if group.rounding != "nearest"]
    tokens = max((enough_tokens(_columns(group)) for group in rounded), default=0)
    short = min(seq_len, TRIAL_SEQ_LEN)
    few = max(TRIAL_SAMPLES, math.ceil(tokens / short))
    if few > samples:
        return samples, min(seq_len, max(short, math.ceil(tokens / samples)))
    return few, short


def cpu_duration_line(plan: Plan, *, samples: int, seq_len: int) -> str | None:
    """Return `duration_line` with the measured speed of this machine's CPU."""
    slowest = calibration_seconds(plan, samples=samples, seq_len=seq_len, flops=SLOW_FLOPS)
    if slowest < LONG_SECONDS:
        return None
    from vexport.numerics.speed import cpu_flops

    return duration_line(plan, samples=samples, seq_len=seq_len, flops=cpu_flops())


def about_minutes(seconds: float) -> str:
    """Return a rounded time in words: `about 40 minutes` or `about 3 hours`."""
    minutes = max(1, math.ceil(seconds / 60))
    if minutes >= 120:
        return f"about {round(minutes / 60):,} hours"
    rounded = round(minutes, -1) if minutes >= 20 else minutes
    return f"about {rounded} minute{'s' if rounded > 1 else ''}"


def _weights(group: FusionGroup) -> int:
    return sum(member.out_features * member.in_features for member in group.members)


def _columns(group: FusionGroup) -> int:
    return group.members[0].in_features
