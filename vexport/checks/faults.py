"""Report layers with a known fault of vLLM (`vexport/architectures/faults.py`).

The kernels that vLLM selects are known here only for some schemes and GPUs. `load --dry` knows the
kernels of all layers.
"""

from collections.abc import Iterable, Iterator

from vexport.architectures import with_stars
from vexport.architectures.faults import FAULTS, FaultyLayer, LayerGroup, RunningLayer, faults_of
from vexport.architectures.fusion import FusedLayer, is_head
from vexport.architectures.versions import VersionFacts
from vexport.checks.devices import refuses_scheme
from vexport.checks.vllm.faulty import fault_finding
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.precision import layer_kinds
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import FP8, MXFP4, PACKED
from vexport.formats.arguments import precision
from vexport.formats.gpus import GENERATIONS
from vexport.formats.integer import VLLM_GROUPS
from vexport.records import Finding
from vexport.version import short_version

CHECK = "faults"
DESCRIPTION = "no known fault of the chosen version of vLLM concerns the layers (--vllm, --sm)"
# Classes of linear layers that run with Humming's kernel on every GPU (_POSSIBLE_WFP8A16_KERNELS in
# vllm/model_executor/kernels/linear/__init__.py).
HUMMING_CLASSES = ("CompressedTensorsW8A16Fp8",)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield a finding for each known fault of the target version on the target's GPUs.

    Without GPUs, only crashes that do not depend on the GPU are reported. Such a crash is a warning
    if other GPUs run the layers.
    """
    if view.quantization.method is not None:
        return
    found: dict[FaultyLayer, tuple[set[str], set[int]]] = {}
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if group is None or not view.layers.is_quantized(fused):
            continue
        for sm in view.target.sm or sorted(GENERATIONS):
            layer = _running(fused, group, view.model.facts, sm)
            for each in faults_of(view.model.facts.faults, sm, [layer]):
                fault = FAULTS[each.fault]
                if view.target.sm or (fault.effect == "crash" and not fault.sms):
                    key = FaultyLayer(
                        fault=each.fault,
                        layer=group.name,
                        kernel=each.kernel,
                        is_known=each.is_known,
                    )
                    names, capabilities = found.setdefault(key, (set(), set()))
                    names.add(each.layer)
                    capabilities.add(sm)
    for each, (names, capabilities) in found.items():
        loading = _loading(view, each.layer)
        yield fault_finding(
            each,
            layer_kinds(names),
            short_version(view.model.version),
            sm=sorted(capabilities),
            is_certain=bool(view.target.sm) or capabilities >= {*loading},
        )


def _running(fused: FusedLayer, group: ConfigGroup, facts: VersionFacts, sm: int) -> RunningLayer:
    place: LayerGroup = "head" if is_head(fused.name) else "linear"
    if fused.experts is not None:
        place = "experts"
    kernel = "" if refuses_scheme(facts, group, sm) else _kernel(group, facts, sm, place)
    is_mxfp4 = bool(kernel) and group.storage is MXFP4
    return RunningLayer(
        name=with_stars(fused.name),
        group=place,
        kernel=kernel,
        stored=precision(group),
        runs=f"W4A{group.storage.gpu_support(group).bits(sm)}" if is_mxfp4 else "",
    )


def _kernel(group: ConfigGroup, facts: VersionFacts, sm: int, place: LayerGroup) -> str:
    """Return the kernel that vLLM selects, or "" if it is not known here."""
    selected = facts.selected_class(group.storage.vllm_scheme(group), sm)
    is_block = group.storage is FP8 and group.weights.strategy == "block"
    if place == "experts":
        if group.storage is MXFP4 and sm in (100, 101, 103):
            return "CutlassExpertsMxfp4"
        is_fp8 = selected == "CompressedTensorsW8A8Fp8" and not is_block
        return "TritonExperts" if is_fp8 and sm in (120, 121) else ""
    if group.storage is PACKED:
        sizes = VLLM_GROUPS.get(group.weights.num_bits, ())
        return "" if group.weights.group_size in sizes else "HummingLinearKernel"
    if group.storage is MXFP4:
        return "FlashInferMxFp4LinearKernel" if sm >= 100 else ""
    if is_block and sm == 121:
        return "DeepGemmFp8BlockScaledMMKernel"
    return "HummingFP8ScaledMMLinearKernel" if selected in HUMMING_CLASSES else ""


def _loading(view: CheckpointView, group_name: str) -> Iterable[int]:
    """Return the compute capabilities that load the scheme of a config group."""
    group = next(each for each in view.quantization.config_groups if each.name == group_name)
    usual = group.storage.vllm_scheme(group)
    return [sm for sm in sorted(GENERATIONS) if view.model.facts.selected_class(usual, sm)]
