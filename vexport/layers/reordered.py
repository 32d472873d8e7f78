"""Schemes that cannot be stored for layers whose rows vLLM's loader reorders."""

from collections.abc import Callable, Iterator, Mapping

from vexport.architectures import Architecture, Reordering
from vexport.formats.schemes import get_scheme
from vexport.records import FusionGroup, Json, LinearPlan, TensorSpec

# Why vLLM would load one of a layer's tensors wrongly or not at all; `size` is that of a head, 0 if unknown.
Reason = Callable[[LinearPlan, TensorSpec, int], str | None]
WEIGHTS = ("weight", "weight_packed")


def unsupported_reordering(
    group: FusionGroup, architecture: Architecture, text: Mapping[str, Json]
) -> str | None:
    """Return why a group's tensors cannot follow the rows of its weights, or None where they do."""
    return next(_reasons(group, architecture, _head_size(text)), None)


def _reasons(group: FusionGroup, architecture: Architecture, head_size: int) -> Iterator[str]:
    scheme = get_scheme(group.scheme)
    for member in group.members:
        last_part = member.name.rpartition(".")[2]
        if last_part not in architecture.reordered:
            continue
        reason_of = REASONS[architecture.reordered[last_part]]
        for spec in scheme.layout(member, "BF16"):
            reason = reason_of(member, spec, head_size)
            if reason:
                yield f"{spec.name.rpartition('.')[2]} {list(spec.shape)} of {last_part}, {reason}"


def _scales_by_row(member: LinearPlan, spec: TensorSpec, head_size: int) -> str | None:
    """permute_qk_weight_for_rotary in vllm/model_executor/models/llama4.py."""
    last_part = spec.name.rpartition(".")[2]
    follows = last_part in WEIGHTS or last_part == "weight_scale"
    if (
        spec.shape == (1,)
        or last_part == "weight_shape"
        or (follows and spec.shape[0] == member.out_features)
    ):
        return None
    return "whose rows vLLM reorders without it"


def _every_tensor(member: LinearPlan, spec: TensorSpec, head_size: int) -> str | None:
    """_repack_qkv in vllm/model_executor/models/bloom.py, _split_key_value in telechat2.py."""
    if spec.shape[0] == member.out_features:
        return None
    return f"of which vLLM takes each tensor for {member.out_features} rows and reorders them"


def _whole_heads(member: LinearPlan, spec: TensorSpec, head_size: int) -> str | None:
    """FalconModel.load_weights in vllm/model_executor/models/falcon.py.

    It cuts each tensor whose parameter has an output dimension: all but scales of the tensor and shapes.
    """
    rows = spec.shape[0]
    if len(spec.shape) == 1:
        return None
    if member.out_features % rows == 0 and head_size and head_size % (member.out_features // rows) == 0:
        return None
    return f"whose rows vLLM reorders by heads of {head_size}"


def _plain_weight(member: LinearPlan, spec: TensorSpec, head_size: int) -> str | None:
    """K2HorizonModel.load_weights in vllm/model_executor/models/k2_horizon.py."""
    return "whose rows vLLM reorders only where it is not quantized"


def _transposed(member: LinearPlan, spec: TensorSpec, head_size: int) -> str | None:
    """_transpose_conv1d in vllm/model_executor/models/gpt2.py turns what is called weight, packed or not."""
    if not spec.name.endswith(".weight"):
        return None
    return "which vLLM turns around when it loads it; take a scheme that stores weight_packed"


REASONS: Mapping[Reordering, Reason] = {
    "scales by row": _scales_by_row,
    "every tensor": _every_tensor,
    "whole heads": _whole_heads,
    "plain weight": _plain_weight,
    "transposed": _transposed,
}


def _head_size(text: Mapping[str, Json]) -> int:
    """Columns of a head, 0 where the config does not tell."""
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
