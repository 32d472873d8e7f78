"""Do layers that vLLM runs as one share the scales that it keeps only once?"""

from collections.abc import Iterator

from vexport.checks.vllm.layers import single_value
from vexport.checks.vllm.view import CheckpointView, FusedLinear
from vexport.types import Finding, Severity

NAME = "fusion"
DESCRIPTION = (
    "q/k/v and gate/up share global and input scales; per-tensor FP8 scales that differ cost accuracy"
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
            fix = "quantize again with a shared scale; vLLM would use the largest for all"
            yield from _unequal(view, fused, parameter, "error", fix)
        if group.weights.strategy == "tensor":
            fix = "quantize again with a shared scale; vLLM requantizes to the largest, a small loss"
            yield from _unequal(view, fused, SHOULD_SHARE, "warning", fix)


def _unequal(
    view: CheckpointView, fused: FusedLinear, parameter: str, severity: Severity, fix: str
) -> Iterator[Finding]:
    """A finding where the members of a fused layer have different single values of a parameter."""
    values = {
        module: value
        for module, parameters in fused.members.items()
        if (value := single_value(view, parameters.get(parameter))) is not None
    }
    if len(set(values.values())) > 1:
        yield Finding(
            check=NAME,
            severity=severity,
            where=f"{fused.name}: {parameter}",
            expected="one value for all layers that run as one",
            got=", ".join(f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items()),
            fix=fix,
        )
