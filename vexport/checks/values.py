"""Are the scales usable numbers? vLLM never looks at them."""

from collections.abc import Iterator

import numpy as np

from vexport.checkpoint.dtypes import BITS
from vexport.checks.subject import Subject, error, linear_modules
from vexport.types import Finding, TensorInfo

NAME = "values"
DESCRIPTION = "every scale is finite and positive, every global scale a plausible divisor"
SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
# 448*6/absmax is below 1 only for absmax above 2688: no weight is that large, so it is a reciprocal.
# Inputs can be, so they are judged by a limit far below what outliers reach.
LEAST_WEIGHT_GLOBAL_SCALE = 1.0
LEAST_INPUT_GLOBAL_SCALE = 1e-3
# e8m0 exponents: 255 is NaN, no value is zero or negative (OCP Microscaling Formats, revision 1.0).
E8M0_NAN = 255


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on scales that are NaN, infinite, zero, negative or reciprocal."""
    for leaves in linear_modules(subject.index).values():
        for leaf in SCALES:
            if leaf in leaves and leaves[leaf].dtype in BITS and leaves[leaf].num_bytes:
                yield from _scale(subject, leaf, leaves[leaf])


def _scale(subject: Subject, leaf: str, tensor: TensorInfo) -> Iterator[Finding]:
    values = subject.reader.array(tensor)
    if tensor.dtype in ("U8", "F8_E8M0"):
        codes = np.frombuffer(subject.reader.raw(tensor), dtype=np.uint8)
        bad = int(np.count_nonzero(codes == E8M0_NAN))
        if bad:
            yield _bad(tensor, f"{bad} of {codes.size} values NaN (e8m0 255)")
        return
    numbers = np.asarray(values, dtype=np.float64)
    wrong = {
        "NaN": int(np.count_nonzero(np.isnan(numbers))),
        "infinite": int(np.count_nonzero(np.isinf(numbers))),
        "zero": int(np.count_nonzero(numbers == 0)),
        "negative": int(np.count_nonzero(numbers < 0)),
    }
    found = [f"{count} of {numbers.size} values {kind}" for kind, count in wrong.items() if count]
    if found:
        yield _bad(tensor, ", ".join(found))
    elif leaf.endswith("global_scale"):
        yield from _reciprocal(tensor, leaf, float(numbers.max()))


def _reciprocal(tensor: TensorInfo, leaf: str, value: float) -> Iterator[Finding]:
    least = LEAST_WEIGHT_GLOBAL_SCALE if leaf.startswith("weight") else LEAST_INPUT_GLOBAL_SCALE
    if value < least:
        yield error(
            NAME,
            tensor.name,
            expected=f"a divisor, 448*6/absmax, of at least {least:g}",
            got=f"{value:g}, which looks like its reciprocal",
            fix="store 1/value, or export again",
        )


def _bad(tensor: TensorInfo, got: str) -> Finding:
    fix = "export again, and look at this layer's weight and calibration"
    return error(NAME, tensor.name, expected="finite scales above zero", got=got, fix=fix)
