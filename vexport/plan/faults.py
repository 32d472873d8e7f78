"""Known faults of vLLM in the layers of a plan."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from vexport.architectures.faults import FaultyLayer, faults_of, recorded_faults
from vexport.architectures.faulty import fault_finding
from vexport.architectures.linears import Names
from vexport.formats.arguments import precision
from vexport.formats.plan import FusionGroup
from vexport.formats.running import on_gpu, running_layer
from vexport.records import Finding
from vexport.version import PINNED, short_version


def plan_faults(
    groups: Iterable[FusionGroup], names: Names, sm: int, ranks: Iterable[int]
) -> Iterator[Finding]:
    """Yield a finding for each known fault of the pinned vLLM in these layers on a GPU.

    `ranks` are tensor parallel sizes.
    """
    version, values = recorded_faults(PINNED)
    found: dict[FaultyLayer, set[str]] = {}
    layers_of: dict[str, set[str]] = {}
    for group, size in product(groups, ranks):
        layer = running_layer(
            group.layer,
            group.members,
            names,
            ranks=size,
            stored=precision(group.scheme.args),
        )
        running = on_gpu(layer, PINNED, group.scheme.args, sm)
        for each in faults_of(values, sm, [running] if running is not None else []):
            found.setdefault(replace(each, layer=group.scheme.name), set()).add(each.layer)
        layers_of.setdefault(group.scheme.name, set()).add(layer.name)
    for each, layers in found.items():
        scheme = each.layer
        where = scheme if layers == layers_of[scheme] else f"{scheme}: {', '.join(sorted(layers))}"
        yield fault_finding(each, where, short_version(version), sm=(sm,))
