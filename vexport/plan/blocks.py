"""Blocks of an output in the order of the source: quantized groups and copied tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.formats.config import kv_layout
from vexport.formats.plan import FusionGroup
from vexport.formats.schemes import Scheme
from vexport.records import AttentionLayer, TensorInfo, TensorSpec

# One item of the output: a group to quantize, a tensor to copy, or a layer with KV scales.
Block = FusionGroup | TensorInfo | AttentionLayer


def blocks(
    index: SourceIndex, groups: Sequence[FusionGroup], attention: Sequence[AttentionLayer] = ()
) -> Iterator[Block]:
    """Yield the blocks of an output: groups to quantize and tensors to copy.

    The blocks have the order of the source's tensors. A group takes the place of its first weight.
    If several experts are stored in one tensor, their groups follow each other at the place of this
    tensor. The scales of the KV cache come last.
    """
    groups_of: dict[str, dict[str, FusionGroup]] = {}
    for group in groups:
        for member in group.members:
            groups_of.setdefault(member.weight, {})[group.name] = group
    done: set[str] = set()
    for tensor in index.tensors.values():
        if tensor.name not in groups_of:
            yield tensor
        for name, group in groups_of.get(tensor.name, {}).items():
            if name not in done:
                done.add(name)
                yield group
    yield from attention


def output_blocks(
    index: SourceIndex, groups: Sequence[FusionGroup], attention: Sequence[AttentionLayer] = ()
) -> Iterator[tuple[TensorSpec, ...]]:
    """Yield the tensors to be written, one tuple for each block."""
    for block in blocks(index, groups, attention):
        if isinstance(block, FusionGroup):
            yield group_layout(block, index.tensors)
        elif isinstance(block, AttentionLayer):
            yield kv_layout(block)
        else:
            yield (TensorSpec(name=block.name, dtype=block.dtype, shape=block.shape),)


def group_layout(group: FusionGroup, tensors: Mapping[str, TensorInfo]) -> tuple[TensorSpec, ...]:
    """Return the tensors that replace a group's weights, member by member."""
    scheme = group.scheme
    return tuple(
        spec
        for member in group.members
        for spec in scheme.layout(member, tensors[member.weight].dtype)
    )


def output_bytes(
    index: SourceIndex, groups: Sequence[FusionGroup], attention: Sequence[AttentionLayer] = ()
) -> int:
    """Return the number of bytes of all tensors to be written."""
    weights = {member.weight for group in groups for member in group.members}
    copied = sum(
        tensor.num_bytes for tensor in index.tensors.values() if tensor.name not in weights
    )
    return (
        copied
        + quantized_bytes(index, groups)
        + sum(_bytes(kv_layout(layer)) for layer in attention)
    )


def quantized_bytes(index: SourceIndex, groups: Sequence[FusionGroup]) -> int:
    """Return the number of bytes of the tensors that replace the groups' weights, with scales."""
    return sum(
        _layer_bytes(
            group.scheme,
            (member.out_features, member.in_features),
            index.tensors[member.weight].dtype,
        )
        for group in groups
        for member in group.members
    )


@cache
def _layer_bytes(scheme: Scheme, shape: tuple[int, int], dtype: str) -> int:
    """Return the bytes of a quantized layer. A model has many layers of few shapes."""
    return sum(num_bytes(*stored) for stored in scheme.stored_parameters(shape, dtype).values())


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(num_bytes(spec.dtype, spec.shape) for spec in specs)
