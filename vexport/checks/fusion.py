"""Check that fused layers share the scales that vLLM stores only once."""

from collections.abc import Iterator, Mapping

from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.checks.numbers import single_value
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.records import Finding, Severity

NAME = "fusion"
DESCRIPTION = (
    "fused layers (q/k/v, gate/up) share global and input scales; different per-tensor FP8 "
    "scales cost accuracy"
)
# vLLM uses the largest value of all members for each member (process_weights_after_loading of
# compressed_tensors_w4a4_nvfp4.py).
WEIGHT_GLOBAL_SCALE, INPUT_GLOBAL_SCALE = "weight_global_scale", "input_global_scale"
# compressed_tensors_w8a8_fp8.py also uses the largest value of all members. For INT8, vLLM uses the
# last member's value. All members have the same input, so they should have the same scale. If the
# scales differ, the scale that most members have is probably correct.
INPUT_SCALES = (INPUT_GLOBAL_SCALE, "input_scale")
# vLLM requantizes all members with the largest weight scale, which loses little precision
# (process_fp8_weight_tensor_strategy).
WEIGHT_SCALE = "weight_scale"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on fused layers with different scales."""
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if len(fused.members) < 2 or group is None:
            continue
        values = _different_values(view, fused, WEIGHT_GLOBAL_SCALE)
        if values and not _only_zero_weights_differ(view, values):
            yield _finding(
                fused, WEIGHT_GLOBAL_SCALE, values, "error", "would use the largest value for all"
            )
        for parameter in INPUT_SCALES:
            if values := _different_values(view, fused, parameter):
                taken = (min if parameter in view.reciprocals else max)(values.values())
                yield _input_finding(fused, parameter, values, group, taken)
        if group.weights.strategy == "tensor" and (
            values := _different_values(view, fused, WEIGHT_SCALE)
        ):
            behavior = "requantizes to the largest value, with a small loss"
            yield _finding(fused, WEIGHT_SCALE, values, "warning", behavior)


def _only_zero_weights_differ(view: CheckpointView, values: Mapping[str, float]) -> bool:
    """Return True if all members with another scale than vLLM uses have only zero weights.

    vLLM uses the largest scale for all members, and any scale is correct for zero weights. Returns
    False for routed experts, because vLLM uses the first member's scale for them.
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
    """Return the finding on different scales of the same input.

    The finding is a warning if the inputs are floating-point and most members have the scale that
    vLLM uses. Otherwise it is an error.
    """
    inputs = group.input_activations
    if inputs is not None and not inputs.is_float:
        return _finding(
            fused, parameter, values, "error", "would use the last value that it reads for all"
        )
    if 2 * sum(value == taken for value in values.values()) > len(values):
        behavior = f"uses {taken:.9g} for all, the value of most layers"
        return _finding(fused, parameter, values, "warning", behavior)
    return _finding(fused, parameter, values, "error", f"would use {taken:.9g} for all")


def _different_values(view: CheckpointView, fused: FusedLayer, parameter: str) -> dict[str, float]:
    """Return a parameter's values by member, or {} if all are equal.

    Only members with a single value of the parameter are compared.
    """
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
    vllm_behavior: str,
) -> Finding:
    """Return a finding that lists the members' values."""
    return Finding(
        check=NAME,
        claim="values",
        severity=severity,
        where=f"{fused.name}: {parameter}",
        expected="one value for all layers that vLLM fuses",
        got=", ".join(
            f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items()
        ),
        fix=f"quantize again with a shared scale; vLLM {vllm_behavior}",
    )
