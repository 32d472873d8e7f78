"""Do layers that vLLM runs as one share the scales that it keeps only once?"""

from collections.abc import Iterator

import numpy as np

from vexport.checks.subject import Subject, Unit, error
from vexport.types import Finding

NAME = "fusion"
DESCRIPTION = "q/k/v and gate/up share their global scales; per-tensor FP8 scales are shared or said to cost"
# vLLM keeps the largest for all (process_weights_after_loading of compressed_tensors_w4a4_nvfp4.py).
MUST_SHARE = ("weight_global_scale", "input_global_scale")
# vLLM requantizes to the largest weight scale and uses the largest input scale (w8a8_utils.py): a small loss.
SHOULD_SHARE = ("weight_scale", "input_scale")


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on fused layers whose scales differ."""
    for unit in subject.units:
        if len(unit.members) < 2:
            continue
        for leaf in MUST_SHARE:
            values = _values(subject, unit, leaf)
            if len(set(values.values())) > 1:
                yield error(
                    NAME,
                    f"{unit.name}: {leaf}",
                    expected="one value for all layers that run as one",
                    got=_listed(values),
                    fix="quantize again with a shared global scale; vLLM would use the largest for all",
                )
        for leaf in SHOULD_SHARE:
            values = _values(subject, unit, leaf)
            if len(set(values.values())) > 1:
                yield Finding(
                    check=NAME,
                    severity="warning",
                    where=f"{unit.name}: {leaf}",
                    expected="one value for all layers that run as one",
                    got=_listed(values),
                    fix="quantize again with a shared scale; vLLM requantizes to the largest, a small loss",
                )


def _values(subject: Subject, unit: Unit, leaf: str) -> dict[str, float]:
    """The single value of a parameter by member; empty where it has more than one."""
    values = {}
    for module, leaves in unit.members.items():
        tensor = leaves.get(leaf)
        if tensor is not None and tensor.num_bytes and int(np.prod(tensor.shape)) == 1:
            values[module] = float(np.asarray(subject.reader.array(tensor), dtype=np.float64).reshape(-1)[0])
    return values


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items())
