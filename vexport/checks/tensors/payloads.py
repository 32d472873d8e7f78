"""Codes and plain values that no weight has: NaN, infinity, more than the announced bits."""

from collections.abc import Iterator, Mapping

import numpy as np

from vexport.checkpoint.dtypes import BITS
from vexport.checks.tensors.scales import E4M3_NAN, LAYER_SCALES
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.view import CheckpointView, error
from vexport.types import Finding, TensorInfo

# Bits that are all set in NaN and infinity, by dtype: e4m3 has no infinity, and its NaN has them all.
NOT_FINITE = {"F8_E4M3": E4M3_NAN, "F16": 0x7C00, "BF16": 0x7F80}
# Elements that are looked at together, as fit a processor's cache; after how many pages are given back.
RUN, RELEASED = 1 << 18, 1 << 24


def beyond(
    view: CheckpointView, check: str, group: ConfigGroup, parameters: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Codes in bytes that the announced bits do not hold."""
    weight, half = parameters.get("weight"), 2 ** (group.weights.num_bits - 1)
    if group.weights.is_float or half >= 128 or weight is None or weight.dtype != "I8":
        return
    codes = np.frombuffer(view.reader.raw(weight), np.int8)
    bad = int(np.count_nonzero((codes >= half) | (codes < -half)))
    if bad:
        yield error(
            check,
            weight.name,
            expected=f"codes of {group.weights.num_bits} bits, from {-half} to {half - 1}",
            got=f"{bad} of {codes.size} beyond them",
            fix="correct num_bits",
        )


def not_finite(view: CheckpointView, check: str) -> Iterator[Finding]:
    """NaN and infinity in payloads of e4m3 and in what is not quantized; a single number without a dimension
    may be a bound, which is infinite where nothing is clipped (input_max of Gemma 4's towers)."""
    for tensor in view.index.tensors.values():
        if tensor.name.endswith(LAYER_SCALES) or tensor.dtype not in (*NOT_FINITE, "F32"):
            continue
        bad = _count_not_finite(view, tensor) if tensor.shape else _is_nan(view, tensor)
        if bad:
            yield error(
                check,
                tensor.name,
                expected="finite values" if tensor.shape else "a number",
                got=f"{bad} values NaN or infinite",
                fix="export again, and look at this tensor in the source",
            )


def _count_not_finite(view: CheckpointView, tensor: TensorInfo) -> int:
    size = BITS[tensor.dtype] // 8
    codes = np.frombuffer(view.reader.raw(tensor), dtype=f"<u{size}")
    signed, sign = codes.view(f"<i{size}"), 1 << 8 * size - 1
    mask = codes.dtype.type(NOT_FINITE.get(tensor.dtype, 0x7F800000))
    bad = 0
    for start in range(0, codes.size, RUN):
        part = codes[start : start + RUN]
        # Of either sign they have the largest bits, which takes less time to see than to count them.
        if part.max() >= sign | mask or signed[start : start + RUN].max() >= mask:
            bad += int(np.count_nonzero((part & mask) == mask))
        if start % RELEASED == 0:
            view.reader.release([tensor])
    view.reader.release([tensor])
    return bad


def _is_nan(view: CheckpointView, tensor: TensorInfo) -> int:
    size = BITS[tensor.dtype] // 8
    code = int.from_bytes(view.reader.raw(tensor)[:size], "little")
    mask = NOT_FINITE.get(tensor.dtype, 0x7F800000)
    return int(code % (1 << 8 * size - 1) >= mask + (tensor.dtype != "F8_E4M3"))  # which has no infinity


def is_zero(view: CheckpointView, tensor: TensorInfo) -> bool:
    """Whether a tensor has zeros only; a part at a time, pages are given back."""
    if view.reader.is_hole(tensor):
        return True
    data = np.frombuffer(view.reader.raw(tensor), np.uint8)
    for start in range(0, data.size, RELEASED):
        if data[start : start + RELEASED].any():
            return False
        view.reader.release([tensor])
    return True
