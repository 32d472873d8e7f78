"""Estimate how long the calibration of a plan takes on the CPU, before it begins."""

import math
import os
from collections.abc import Mapping

from vexport.architectures import resolve
from vexport.architectures.fusion import moe_layer
from vexport.architectures.linears import names_of
from vexport.checkpoint.index import SourceIndex
from vexport.formats.plan import FusionGroup, Plan
from vexport.numerics.cpu import bf16_units
from vexport.plan.rules import (
    SMOOTHING_ROWS,
    TOKEN_WEIGHT_ROWS,
    rounds_with_text,
    statistics_need,
)

# Time per weight to search scales and to round column by column, as the number of float32
# operations that a matrix product does in this time. `calibration_operations` adds the matrix
# products with the moments of the inputs. Measured on a Xeon with AVX-512 (one thread, 86 GFLOPS,
# 6 layers of SmolLM2-135M in W4A16_G64): a layer of 3.5 million weights took 0.7 s in all with 256
# tokens. With 2,048 tokens it took 1.24 s, and the estimate is 1.28 s.
ROUNDING_PER_WEIGHT = 14_000
# Operations of a CPU core in a second of calibration. SmolLM2-135M in W4A16_G64 with 16 samples of
# 256 tokens reached 31e9 with AVX-512 and 12e9 without it. A Zen 5 CPU, which has units for bf16,
# reached 233e9 with 16 samples of 512 tokens, and 250e9 with 64 samples.
CORE_SPEED, BF16_CORE_SPEED = 20e9, 150e9
# Channels of a picture.
_CHANNELS = 3
# Shorter calibrations get no line about their duration.
LONG_SECONDS = 120.0


def calibration_seconds(plan: Plan, *, samples: int, seq_len: int, pictures: float = 0.0) -> float:
    """Return the order of magnitude of the seconds of all calibration steps on this machine.

    `pictures` is the result of `tower_operations`.
    """
    operations = calibration_operations(plan, samples=samples, seq_len=seq_len, pictures=pictures)
    return operations / speed()


def speed() -> float:
    """Return the operations in a second of calibration on the cores that this process may use."""
    has_units = bf16_units() in ("amx", "avx512")
    return (BF16_CORE_SPEED if has_units else CORE_SPEED) * len(os.sched_getaffinity(0))


def tower_operations(index: SourceIndex, values: int) -> float:
    """Return the operations of a model's tower on pictures with this number of values.

    They are 2 operations for each weight and patch, as for tokens of text.
    """
    config = index.config.get("vision_config")
    vision = config if isinstance(config, Mapping) else {}
    patch, frames = vision.get("patch_size"), vision.get("temporal_patch_size", 1)
    side = patch[0] if isinstance(patch, list) and patch else patch
    if not isinstance(side, int) or not isinstance(frames, int):
        return 0.0
    names = names_of(index, resolve(index.architecture, index.config)[0])
    weights = sum(
        math.prod(tensor.shape)
        for tensor in index.tensors.values()
        if len(tensor.shape) == 2 and names.is_beside(tensor.name.rpartition(".")[0])
    )
    return 2 * weights * values / (_CHANNELS * side**2 * frames)


def calibration_operations(
    plan: Plan, *, samples: int, seq_len: int, pictures: float = 0.0
) -> float:
    """Return the number of operations of all calibration steps."""
    tokens = samples * seq_len
    weights = sum(_weights(group) for group in plan.groups if not group.in_tower)
    rounded = [group for group in plan.groups if group.rounding != "nearest"]
    refitted = [group for group in rounded if group.rounding == "refit"]
    gradients = 0.0
    if plan.smoothing or refitted:
        # Embeddings and the output head. They count once, because most small models share them.
        head = max(plan.parameters - weights, 0)
        rows = min(samples, SMOOTHING_ROWS if plan.smoothing else TOKEN_WEIGHT_ROWS)
        # A forward pass, then a second forward pass and a backward pass. The head is not part of
        # the first forward pass. Each pass takes 2 operations for each weight and token.
        gradients = rows * seq_len * (3 * 2 * weights + 2 * 2 * head) + pictures * rows / samples
    forward = 2 * weights * tokens
    if not rounds_with_text(plan):
        return gradients + (pictures + forward if statistics_need(plan) else 0.0)
    # A refit uses the outputs of the tower for both models.
    once = gradients + pictures
    streams = 2 if refitted else 1
    # The moments of the inputs are symmetric, so only half of them is computed. A refit also needs
    # products with the inputs of the original model, or with its outputs if they are fewer.
    moments = sum(_columns(group) ** 2 for group in rounded)
    moments += sum(2 * _columns(group) * _source_columns(group) for group in refitted)
    rounding = sum(
        _weights(group) * (ROUNDING_PER_WEIGHT + 2 * streams * _columns(group)) for group in rounded
    )
    return once + streams * forward + moments * tokens + rounding


def duration_line(plan: Plan, *, samples: int, seq_len: int, pictures: float = 0.0) -> str | None:
    """Return how long calibration takes on this machine's CPUs, or None if it is short."""
    seconds = calibration_seconds(plan, samples=samples, seq_len=seq_len, pictures=pictures)
    if seconds < LONG_SECONDS:
        return None
    busy = "on a busy machine up to four times as long"
    return f"calibration will take {about_minutes(seconds)} on this CPU; {busy}"


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


def _source_columns(group: FusionGroup) -> int:
    """Return the number of columns that a refit multiplies with the inputs: those of a layer's
    outputs if the layer is alone and has fewer outputs, and otherwise those of the inputs.
    """
    first = group.members[0]
    is_alone = len(group.members) == 1 and moe_layer(first.name) is None
    return min(first.in_features, first.out_features) if is_alone else first.in_features
