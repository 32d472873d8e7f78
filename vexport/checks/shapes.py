"""Are dtypes and shapes those of the config group?"""

from collections.abc import Iterator

from vexport.checks.expected import Expected, expected_parameters, layer_sides
from vexport.checks.subject import ConfigGroup, Subject, Unit, error
from vexport.schemes import fp8
from vexport.schemes.base import EXPERT, SchemeArgs, Share, is_head
from vexport.types import Finding, TensorInfo

NAME = "shapes"
DESCRIPTION = "dtypes and shapes are those that the config group announces, and fused layers fit together"


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on tensors that vLLM would refuse, narrow or cast."""
    for unit in subject.units:
        group = subject.group_of(unit)
        if group is None or not unit.is_quantized:
            continue
        yield from _fit_together(group, unit)
        yield from _whole_blocks(group, unit)
        for leaves in unit.members.values():
            for leaf, expected in (expected_parameters(group, leaves) or {}).items():
                if leaf in leaves:
                    yield from _tensor(group, leaves[leaf], expected)


def _tensor(group: ConfigGroup, tensor: TensorInfo, expected: Expected) -> Iterator[Finding]:
    if tensor.dtype not in expected.dtypes:
        yield error(
            NAME,
            tensor.name,
            expected=f"dtype {' or '.join(sorted(expected.dtypes))} ({group.format})",
            got=tensor.dtype,
            fix="export it again: vLLM would cast the values without a word",
        )
    scalar = expected.shape == (1,) and tensor.shape == ()
    if tensor.shape != expected.shape and not scalar:
        yield error(
            NAME,
            tensor.name,
            expected=f"shape {list(expected.shape)} ({group.format}, {_granularity(group)})",
            got=str(list(tensor.shape)),
            fix="export it again, or correct the config group",
        )


def _fit_together(group: ConfigGroup, unit: Unit) -> Iterator[Finding]:
    widths = {
        module: sides[1] for module, leaves in unit.members.items() if (sides := layer_sides(group, leaves))
    }
    if len(set(widths.values())) > 1:
        yield error(
            NAME,
            unit.name,
            expected="the same in_features in all layers that run as one",
            got=", ".join(f"{module.rpartition('.')[2]} {width}" for module, width in widths.items()),
            fix="export the checkpoint again",
        )
    size = group.weights.group_size
    for module, width in widths.items():
        if size and size > 0 and width % size:
            yield error(
                NAME,
                module,
                expected=f"in_features that are a multiple of group_size {size}",
                got=str(width),
                fix="quantize the layer with another group size, or keep it",
            )


def _whole_blocks(group: ConfigGroup, unit: Unit) -> Iterator[Finding]:
    """What vLLM refuses at every tensor parallel size."""
    sides = [found for leaves in unit.members.values() if (found := layer_sides(group, leaves))]
    if group.weights.strategy != "block" or not group.weights.block_structure or not sides:
        return
    args = SchemeArgs(weights=group.weights, input_activations=group.input_activations)
    rows = tuple(side[0] for side in sides)
    share = Share(
        out_features=rows,
        in_features=sides[0][1],
        experts=EXPERT.search(next(iter(unit.members))) is not None,
        head=is_head(unit.name),
    )
    misfit = fp8.FAMILY.misfit(args, share)
    if misfit:
        yield error(
            NAME,
            unit.name,
            expected="whole blocks in layers that vLLM runs as one, but for the last",
            got=misfit,
            fix="quantize the layer per channel, or keep it",
        )


def _granularity(group: ConfigGroup) -> str:
    size = group.weights.group_size
    return f"{group.weights.strategy} {size}" if size else group.weights.strategy
