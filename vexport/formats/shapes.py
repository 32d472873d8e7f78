"""Find reasons why vLLM cannot run a fused layer in a scheme: sizes, order of rows, ranks.

Each reason is a sentence without a final period.
"""

from collections.abc import Sequence

from vexport.architectures import Reordering
from vexport.architectures.config import known_size
from vexport.architectures.fusion import FusedLayer
from vexport.architectures.linears import Names
from vexport.architectures.ranks import on_all_ranks, parts_of, split_of, uneven
from vexport.formats.schemes import Scheme
from vexport.records import LinearPlan, TensorSpec

WEIGHTS = ("weight", "weight_packed")
# Tensors of a layer that vLLM splits by whole groups (mamba_v2_sharded_weight_loader in
# mamba/mamba_mixer2.py).
GROUPED_TENSORS = ("weight", "weight_scale", "input_scale")


def unsupported_on(
    layer: FusedLayer,
    members: Sequence[LinearPlan],
    scheme: Scheme | None,
    names: Names,
    ranks: int,
) -> str | None:
    """Return why vLLM could not run a fused layer on this number of ranks, or None if it can.

    `members` are the layer's linear layers with their sizes. A scheme of None stands for an
    unquantized layer.
    """
    if ungrouped := _ungrouped(layer, members, scheme, names, ranks):
        return ungrouped
    split = split_of(layer, names)
    # Each rank needs whole heads of keys and values. vLLM repeats heads if there are fewer heads
    # than ranks.
    parts = [on_all_ranks(part, ranks, names.text) for part in parts_of(layer, members, names)]
    if scheme is None:
        return uneven(parts, ranks, split)
    return scheme.unsupported_shape(parts, ranks=ranks, split=split)


def unsupported_reordering(
    members: Sequence[LinearPlan], scheme: Scheme, names: Names
) -> str | None:
    """Return why vLLM cannot reorder the rows of all stored tensors, or None if it can.

    vLLM's loaders of some classes reorder the rows of a weight (`Architecture.reordered`).
    """
    width = known_size("hidden_size // num_attention_heads", names.text)
    for member in members:
        last_part = member.name.rpartition(".")[2]
        reordering = names.architecture.reordered.get(last_part)
        for spec in scheme.layout(member, "BF16") if reordering else ():
            if reordering and (reason := _reordering_problem(reordering, member, spec, width)):
                return reason
    return None


def _reordering_problem(
    reordering: Reordering, member: LinearPlan, spec: TensorSpec, head_size: int
) -> str | None:
    """Return why vLLM would fail to load a tensor or load it incorrectly, or None.

    An unknown `head_size` is 0.

    Sources in vllm/model_executor/models: permute_qk_weight_for_rotary of llama4.py (scales by
    row), _repack_qkv of bloom.py and _split_key_value of telechat2.py (every tensor),
    K2HorizonModel.load_weights of k2_horizon.py (plain weight), _transpose_conv1d of gpt2.py, which
    transposes only tensors with the name `weight` (transposed). FalconModel.load_weights of
    falcon.py (whole heads) cuts each tensor that has an output dimension: all except shapes and
    scales of whole tensors.
    """
    last_part = spec.name.rpartition(".")[2]
    rows = spec.shape[0]
    tensor = f"{last_part} {list(spec.shape)} of {member.name.rpartition('.')[2]}"
    by_row = rows == member.out_features
    if reordering == "scales by row":
        follows = last_part in (*WEIGHTS, "weight_scale") and by_row
        moves = spec.shape == (1,) or last_part == "weight_shape" or follows
        return None if moves else f"vLLM does not reorder {tensor} together with the weight's rows"
    if reordering == "every tensor":
        reason = f"vLLM would reorder {tensor} as if it had {member.out_features} rows"
        return None if by_row else reason
    if reordering == "whole heads":
        whole = member.out_features % rows == 0 and head_size % (member.out_features // rows) == 0
        moves = len(spec.shape) == 1 or whole and head_size > 0
        return None if moves else f"vLLM cannot reorder {tensor} by heads of {head_size}"
    if reordering == "plain weight":
        return f"vLLM reorders {tensor} only in an unquantized layer"
    reason = f"vLLM transposes {tensor} at loading; use a scheme that stores weight_packed"
    return reason if last_part == "weight" else None


def _ungrouped(
    layer: FusedLayer,
    members: Sequence[LinearPlan],
    scheme: Scheme | None,
    names: Names,
    ranks: int,
) -> str | None:
    """Return why the groups of a layer cannot be divided over the ranks, or None if they can.

    These are groups of heads in a layer's rows (`Architecture.groups`), not groups with a scale. If
    there is a single group, every rank gets a copy.
    """
    expression = names.architecture.groups.get(layer.projection)
    count = known_size(expression, names.text) if expression else 0
    if not count or count % ranks == 0:
        return None
    if count > 1:
        return f"{count} groups cannot be divided over {ranks} ranks"
    for spec in scheme.layout(members[0], "BF16") if scheme is not None else ():
        last_part = spec.name.rpartition(".")[2]
        by_row = spec.shape[0] == members[0].out_features
        if last_part not in GROUPED_TENSORS or not by_row:
            return (
                f"vLLM does not split {last_part} {list(spec.shape)} over {ranks} ranks, because "
                f"there is only one group"
            )
    return None
