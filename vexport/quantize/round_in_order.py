"""The groups of a decoder layer rounded one after another, in the order in which the text comes to them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from vexport.formats.packing.base import Array
from vexport.numerics.ranks import gather
from vexport.quantize.applied import QuantizedLayer, QuantizedModel
from vexport.quantize.group_inputs import GroupInputs, Value
from vexport.quantize.layer_sums import LayerSums
from vexport.quantize.rounded_layers import Stored
from vexport.quantize.waiting_rows import WaitingRows
from vexport.types import FusionGroup
from vexport.types.rounding import GroupRounding


def round_in_order(
    model: QuantizedModel,
    groups: Sequence[FusionGroup],
    inputs: GroupInputs,
    rows: WaitingRows,
    source: Sequence[dict[str, Value]],
    sums_of: Callable[[GroupInputs], LayerSums],
) -> tuple[Stored, tuple[GroupRounding, ...]]:
    """The bytes that replace the weights of the groups, and how each was rounded. All ranks call.

    `source` has what enters the source's layer of each row of this rank that is fitted; what was used is
    taken out. In the end all `rows` have gone through the layer as it was rounded.
    """
    stored, how = dict[str, Array](), dict[str, GroupRounding]()
    layers = list[QuantizedLayer]()
    with ExitStack() as block:

        def round_here(own: Sequence[FusionGroup], sums: LayerSums) -> None:
            part, told = sums.round(model, own)
            stored.update(part)
            how.update({one.name: one for one in told})
            layers.extend(layer for group in own for layer in model.layers_of(group, part))
            # One parameter can hold weights of several groups, not all rounded at once.
            changed = {model.parameter_of(member) for group in own for member in group.members}
            whole = [layer for layer in layers if model.parameter_of(layer.member) in changed]
            block.enter_context(model.with_weights(whole))

        block.enter_context(model.rounding_inputs(groups))
        reached = {group.name for site in inputs.sites for group in site.groups}
        round_here([group for group in groups if group.name not in reached], sums_of(inputs.only(None)))
        block.enter_context(rows.stopping(inputs))
        left = list(inputs.modules)
        while left:
            waiting = set[str]().union(*gather(rows.names))
            name = next((name for name in left if name in waiting), left[0])
            left.remove(name)
            here = inputs.only(name)
            sums = sums_of(here)
            for position, exact in enumerate(source):
                sums.add(rows.noted(position, name), exact)
            round_here([group for site in here.sites for group in site.groups], sums)
            for exact in source:
                exact.pop(name, None)
            rows.let_through(name)
    names = [*inputs.unreachable, *(group.name for site in inputs.sites for group in site.groups)]
    return stored, tuple(how[name] for name in names)
