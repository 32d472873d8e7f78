"""Report layers with a known fault of vLLM (`vexport/architectures/faults.py`).

The kernels are those that vLLM selected in recorded dry loads (`vexport/formats/running.py`).
`load --dry` knows the kernels of all layers and sizes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from vexport.architectures.faults import (
    FAULTS,
    FaultyLayer,
    RunningLayer,
    faults_of,
    recorded_faults,
)
from vexport.architectures.faulty import fault_finding
from vexport.architectures.fusion import FusedLayer
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.precision import layer_kinds
from vexport.checks.vllm.view import CheckpointView
from vexport.formats.arguments import precision
from vexport.formats.gpus import GENERATIONS
from vexport.formats.running import on_gpu, running_layer
from vexport.records import Finding
from vexport.version import short_version

CHECK = "faults"
DESCRIPTION = "no known fault of the chosen version of vLLM concerns the layers (--vllm, --sm)"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield a finding for each known fault of the target version on the target's GPUs.

    Without GPUs, only crashes that do not depend on the GPU are reported. Such a crash is a warning
    if other GPUs run the layers.
    """
    if view.quantization.method is not None:
        return
    version, _ = recorded_faults(view.model.target_version)
    found: dict[FaultyLayer, tuple[set[str], set[int]]] = {}
    for layer, group in _layers(view):
        for sm in view.target.sm or sorted(GENERATIONS):
            for each in _faults(view, layer, group, sm):
                fault = FAULTS[each.fault]
                if view.target.sm or (fault.effect == "crash" and not fault.sms):
                    key = replace(each, layer=group.name)
                    names, capabilities = found.setdefault(key, (set(), set()))
                    names.add(each.layer)
                    capabilities.add(sm)
    for each, (names, capabilities) in found.items():
        loading = _loading(view, each.layer)
        yield fault_finding(
            each,
            layer_kinds(names),
            short_version(version),
            sm=sorted(capabilities),
            is_certain=bool(view.target.sm) or capabilities >= {*loading},
        )


def rounded_layers(view: CheckpointView, group: ConfigGroup) -> frozenset[tuple[str, int]]:
    """Return the layers of a group whose inputs a known fault rounds, with the target's GPU."""
    layers = [layer for layer, other in _layers(view) if other.name == group.name]
    return frozenset(
        (layer.name, sm)
        for sm, layer in product(view.target.sm, layers)
        for each in _faults(view, layer, group, sm)
        if each.is_known and FAULTS[each.fault].effect == "fewer-bits"
    )


def _layers(view: CheckpointView) -> Iterator[tuple[RunningLayer, ConfigGroup]]:
    """Yield the quantized layers as each number of ranks runs them, each kind once."""
    seen = set[tuple[RunningLayer, str]]()
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if group is None or not view.layers.is_quantized(fused):
            continue
        for ranks in view.target.tp or (1,):
            layer = _layer(view, fused, group, ranks)
            if (layer, group.name) not in seen:
                seen.add((layer, group.name))
                yield layer, group


def _layer(view: CheckpointView, fused: FusedLayer, group: ConfigGroup, ranks: int) -> RunningLayer:
    members = None
    if fused.experts is None:  # the sizes of experts do not matter, and there are many
        members = view.layers.members_with_sizes(fused, group)
    return running_layer(fused, members, view.model.names, ranks=ranks, stored=precision(group))


def _faults(
    view: CheckpointView, layer: RunningLayer, group: ConfigGroup, sm: int
) -> Iterable[FaultyLayer]:
    _, values = recorded_faults(view.model.target_version)
    running = on_gpu(layer, view.model.version, group, sm)
    return faults_of(values, sm, [running] if running is not None else [])


def _loading(view: CheckpointView, group_name: str) -> Iterable[int]:
    """Return the compute capabilities that load the scheme of a config group."""
    group = next(each for each in view.quantization.config_groups if each.name == group_name)
    usual = group.storage.vllm_scheme(group)
    return [sm for sm in sorted(GENERATIONS) if view.model.facts.selected_class(usual, sm)]
