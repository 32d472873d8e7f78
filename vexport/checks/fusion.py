"""Check that fused layers share the scales that vLLM stores only once."""

from collections.abc import Iterator, Mapping

from vexport.architectures.fusion import FusedLayer, moe_layer
from vexport.checks.numbers import single_value
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.view import CheckpointView
from vexport.checks.vllm.zeros import is_empty
from vexport.records import Finding
from vexport.rules import fusion as rules

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
            where = f"{fused.name}: {WEIGHT_GLOBAL_SCALE}"
            yield Finding.at(rules.WEIGHT_GLOBAL_SCALE, where, values=listed_values(values))
        for parameter in INPUT_SCALES:
            if values := _different_values(view, fused, parameter):
                used = (min if parameter in view.reciprocals else max)(values.values())
                yield _input_finding(f"{fused.name}: {parameter}", values, group, used)
        if group.weights.strategy == "tensor" and (
            values := _different_values(view, fused, WEIGHT_SCALE)
        ):
            where = f"{fused.name}: {WEIGHT_SCALE}"
            yield Finding.at(rules.WEIGHT_SCALE, where, values=listed_values(values))


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
    where: str, values: Mapping[str, float], group: ConfigGroup, used: float
) -> Finding:
    inputs, listed = group.input_activations, listed_values(values)
    if inputs is not None and not inputs.is_float:
        return Finding.at(rules.INTEGER_INPUT_SCALE, where, values=listed)
    is_usual = 2 * sum(value == used for value in values.values()) > len(values)
    rule = rules.INPUT_SCALE.as_warning if is_usual else rules.INPUT_SCALE
    return Finding.at(rule, where, values=listed, used=used)


def _different_values(view: CheckpointView, fused: FusedLayer, parameter: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for module in fused.members:
        value = single_value(view.reader, view.model.modules[module].get(parameter))
        if value is not None:
            values[module] = value
    return values if len(set(values.values())) > 1 else {}


def listed_values(values: Mapping[str, float]) -> list[str]:
    """Return each layer's name and value, for messages."""
    return [f"{module.rpartition('.')[2]} {value:.9g}" for module, value in values.items()]
