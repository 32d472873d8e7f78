"""Do layers that vLLM runs as one share the scales that it keeps only once?"""

from collections.abc import Iterator

import numpy as np

from vexport.checks.vllm.view import CheckpointView, FusedLinear, error, warning
from vexport.types import Finding

NAME = "fusion"
DESCRIPTION = (
    "q/k/v and gate/up share global and input scales; per-tensor FP8 scales are shared or said to cost"
)
# vLLM keeps the largest for all (process_weights_after_loading of compressed_tensors_w4a4_nvfp4.py).
MUST_SHARE = ("weight_global_scale", "input_global_scale")
# The same of compressed_tensors_w8a8_fp8.py; INT8 keeps the last. They run on one input, so that only a fault
# makes their scales differ.
INPUT_SCALE = "input_scale"
# vLLM requantizes to the largest weight scale (process_fp8_weight_tensor_strategy): a small loss.
SHOULD_SHARE = "weight_scale"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on fused layers whose scales differ."""
    for fused in view.fused_linears:
        group = view.group_of(fused)
        if len(fused.members) < 2 or group is None:
            continue
        for parameter in (*MUST_SHARE, INPUT_SCALE):
            values = _values(view, fused, parameter)
            if len(set(values.values())) > 1:
                yield error(
                    NAME,
                    f"{fused.name}: {parameter}",
                    expected="one value for all layers that run as one",
                    got=_listed(values),
                    fix="quantize again with a shared scale; vLLM would use the largest for all",
                )
        values = _values(view, fused, SHOULD_SHARE) if group.weights.strategy == "tensor" else {}
        if len(set(values.values())) > 1:
            yield warning(
                NAME,
                f"{fused.name}: {SHOULD_SHARE}",
                expected="one value for all layers that run as one",
                got=_listed(values),
                fix="quantize again with a shared scale; vLLM requantizes to the largest, a small loss",
            )


def _values(view: CheckpointView, fused: FusedLinear, parameter: str) -> dict[str, float]:
    """The single value of a parameter by member; empty where it has more than one."""
    values = {}
    for module, parameters in fused.members.items():
        tensor = parameters.get(parameter)
        if tensor is not None and tensor.num_bytes and int(np.prod(tensor.shape)) == 1:
            values[module] = float(view.reader.floats(tensor).reshape(-1)[0])
    return values


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items())
