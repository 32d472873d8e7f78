"""Is the combination of version, GPU, scheme and model one that others have reported as bad?"""

from collections.abc import Iterator, Mapping

from vexport.architectures.known_bad import KnownBad, known_bad
from vexport.checks.kv_cache import cache_scheme
from vexport.checks.vllm.view import CheckpointView, ConfigGroup, warning
from vexport.types import Finding
from vexport.version import short_version

NAME = "known_bad"
DESCRIPTION = "nobody has reported that this version, GPU and scheme answer wrongly or slowly (--vllm, --sm)"


def run(view: CheckpointView) -> Iterator[Finding]:
    """A warning for each report that fits."""
    version = short_version(view.target.vllm)
    for report in known_bad():
        if version in report.vllm and _fits(view, report):
            gpus = sorted({*report.sm} & {*view.target.sm})
            where = f"vLLM {version}" + (f", SM {'/'.join(map(str, gpus))}" if gpus else "")
            yield warning(
                NAME,
                where,
                expected="a combination that nobody has reported as bad",
                got=f"{report.what} ({report.source})",
                fix=report.fix,
            )


def _fits(view: CheckpointView, report: KnownBad) -> bool:
    """Whether all that a report names is asked for and in the checkpoint."""
    if report.sm and not {*report.sm} & {*view.target.sm}:
        return False
    if report.kv_cache and cache_scheme(view) is None:
        return False
    if not view.class_name.startswith(report.classes):
        return False
    return not report.schemes or any(_is_meant(view, report, group, width) for group, width in _widths(view))


def _is_meant(view: CheckpointView, report: KnownBad, group: ConfigGroup, width: int) -> bool:
    if group.storage.vllm_scheme(group) not in report.schemes or group.input_activations is None:
        return False
    if report.strategy and group.weights.strategy != report.strategy:
        return False
    return not report.inputs_not_multiple_of or bool(width % report.inputs_not_multiple_of)


def _widths(view: CheckpointView) -> Iterator[tuple[ConfigGroup, int]]:
    """The group of each quantized layer with the in_features that a rank has of it."""
    seen: Mapping[tuple[str, int], ConfigGroup] = {
        (group.name, width): group
        for fused in view.fused_linears
        if (group := view.group_of(fused)) is not None
        for module, parameters in fused.members.items()
        if (shape := view.linear_shape(group, module, parameters))
        for width in _parts(view, fused.name.rpartition(".")[2], shape[1])
    }
    yield from ((group, width) for (_, width), group in seen.items())


def _parts(view: CheckpointView, projection: str, width: int) -> Iterator[int]:
    for ranks in view.target.tp or (1,):
        yield width // ranks if projection in view.architecture.row_parallel else width
