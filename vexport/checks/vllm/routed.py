"""Which schemes vLLM runs for routed experts: fewer than for linear layers.

Sources: `get_moe_method` in vLLM's compressed_tensors_moe.py, and the methods of experts that it picks.
"""

from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.scheme import PACKED, SchemeKind, described, scheme_of

# Strategies of weights and inputs that the methods for FP8 and INT8 take.
FP8_PAIRS = (("tensor", "tensor"), ("channel", "token"))
INT8_PAIRS = (("channel", "token"),)
# CompressedTensorsW4A8Fp8MoEMethod.
FP8_INPUT_GROUP = 128


def refusal(group: ConfigGroup) -> str | None:
    """Why vLLM refuses for routed experts what it runs for linear layers; None where it does not."""
    kind = scheme_of(group)
    strategies = (group.weights.strategy, group.input_activations and group.input_activations.strategy)
    runs = {
        SchemeKind.FP8: strategies in FP8_PAIRS or _is_block(group),
        SchemeKind.INT8: strategies in INT8_PAIRS,
        SchemeKind.PACKED: _runs_packed(group),
        SchemeKind.INT4: False,  # on Arm CPUs only
    }
    if not isinstance(kind, SchemeKind) or runs.get(kind, True):
        return None
    return f"a combination that it does not run for routed experts: {described(group)}"


def _is_block(group: ConfigGroup) -> bool:
    return group.weights.strategy == "block" and group.input_activations is not None


def _runs_packed(group: ConfigGroup) -> bool:
    inputs = group.input_activations
    if inputs is None:
        return group.format == PACKED
    return inputs.type == "float" and group.weights.group_size == FP8_INPUT_GROUP
