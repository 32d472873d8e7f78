"""Do layers that vLLM runs as one share the scales that it keeps only once?"""

from collections.abc import Iterator, Mapping

from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.checks.numbers import single_value
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.records import Finding, Severity

NAME = "fusion"
DESCRIPTION = (
    "q/k/v and gate/up share global and input scales; per-tensor FP8 scales that "
    "differ cost accuracy"
)
# vLLM keeps the largest for all (process_weights_after_loading of
# compressed_tensors_w4a4_nvfp4.py).
WEIGHT_GLOBAL_SCALE, INPUT_GLOBAL_SCALE = "weight_global_scale", "input_global_scale"
# The same of compressed_tensors_w8a8_fp8.py; INT8 keeps the last. They run on one input, so that
# only a fault makes their scales differ: in which of them, most tell.
INPUT_SCALES = (INPUT_GLOBAL_SCALE, "input_scale")
# vLLM requantizes to the largest weight scale (process_fp8_weight_tensor_strategy): a small loss.
WEIGHT_SCALE = "weight_scale"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on fused layers whose scales differ."""
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if len(fused.members) < 2 or group is None:
            continue
        values = _differing(view, fused, WEIGHT_GLOBAL_SCALE)
        if values and not _differ_in_zeros(view, values):
            yield _finding(
                fused, WEIGHT_GLOBAL_SCALE, values, "error", "would use the largest for all"
            )
        for parameter in INPUT_SCALES:
            if values := _differing(view, fused, parameter):
                taken = (min if parameter in view.reciprocals else max)(values.values())
                yield _input_finding(fused, parameter, values, group, taken)
        if group.weights.strategy == "tensor" and (values := _differing(view, fused, WEIGHT_SCALE)):
            fix = "requantizes to the largest, a small loss"
            yield _finding(fused, WEIGHT_SCALE, values, "warning", fix)


def _differ_in_zeros(view: CheckpointView, values: Mapping[str, float]) -> bool:
    """Return whether all members have the global scale that vLLM takes, except members of zeros
    only.

    Routed experts are left out: vLLM takes the first member's scale there.
    """
    if any(moe_layer(module) is not None for module in values):
        return False
    taken = (min if WEIGHT_GLOBAL_SCALE in view.reciprocals else max)(values.values())
    others = [module for module, value in values.items() if value != taken]
    return all(is_empty(view, view.layers.by_name[module]) for module in others)


def _input_finding(
    fused: FusedLayer,
    parameter: str,
    values: Mapping[str, float],
    group: ConfigGroup,
    taken: float,
) -> Finding:
    """Different scales of one input: a warning where the one that vLLM takes is what most members
    have.
    """
    inputs = group.input_activations
    if inputs is not None and not inputs.is_float:
        return _finding(
            fused, parameter, values, "error", "would use the last that it reads for all"
        )
    if 2 * sum(value == taken for value in values.values()) > len(values):
        return _finding(
            fused, parameter, values, "warning", f"uses {taken:.9g} for all, as most have"
        )
    return _finding(fused, parameter, values, "error", f"would use {taken:.9g} for all")


def _differing(view: CheckpointView, fused: FusedLayer, parameter: str) -> dict[str, float]:
    """The single values of a parameter by the members that have one; none where all are equal."""
    values: dict[str, float] = {}
    for module in fused.members:
        value = single_value(view.reader, view.model.modules[module].get(parameter))
        if value is not None:
            values[module] = value
    return values if len(set(values.values())) > 1 else {}


def _finding(
    fused: FusedLayer,
    parameter: str,
    values: Mapping[str, float],
    severity: Severity,
    what_vllm_does: str,
) -> Finding:
    """The members' different values."""
    return Finding(
        check=NAME,
        severity=severity,
        where=f"{fused.name}: {parameter}",
        expected="one value for all layers that run as one",
        got=", ".join(
            f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items()
        ),
        fix=f"quantize again with a shared scale; vLLM {what_vllm_does}",
    )
