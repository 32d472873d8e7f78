"""What is publicly known to go wrong with a plan's schemes in the vLLM that it is made for."""

from collections.abc import Iterator, Sequence

from vexport.architectures.known_bad import KnownBad, known_bad
from vexport.formats.schemes import get_scheme
from vexport.types import Finding, FusionGroup
from vexport.version import short_version


def known_bad_notes(class_name: str, groups: Sequence[FusionGroup], *, kv_cache: bool) -> Iterator[Finding]:
    """A warning for each report that fits, whatever GPUs it is about: a plan names none."""
    version = short_version()
    for report in known_bad():
        if report.is_of(version, class_name, kv_cache=kv_cache) and _fits(report, groups):
            yield report.finding(version, report.sm)


def _fits(report: KnownBad, groups: Sequence[FusionGroup]) -> bool:
    layers = {(group.scheme, member.in_features) for group in groups for member in group.members}
    return not report.schemes or any(_is_about(report, scheme, width) for scheme, width in layers)


def _is_about(report: KnownBad, name: str, width: int) -> bool:
    scheme = get_scheme(name)
    if scheme.args.input_activations is None:
        return False
    return report.is_about_layer(scheme.format.vllm_scheme(scheme.args), scheme.args.weights.strategy, width)
