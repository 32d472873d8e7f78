"""Is the combination of version, GPU, scheme and model one that others have reported as bad?"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vexport.architectures.known_bad import CHECK, KnownBad, known_bad
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.checks.kv_cache import cache_scheme
from vexport.checks.vllm.target import Target
from vexport.checks.vllm.view import CheckpointView, ConfigGroup
from vexport.errors import InputError
from vexport.types import Finding
from vexport.version import short_version

NAME = CHECK
DESCRIPTION = "nobody has reported that this version, GPU and scheme answer wrongly or slowly (--vllm, --sm)"
VERSION = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)")


def run(view: CheckpointView) -> Iterator[Finding]:
    """A warning for each report that fits."""
    version = short_version(view.target.vllm)
    for report in known_bad():
        if _fits(view, report, version):
            yield report.finding(version, {*report.sm} & {*view.target.sm})


def reported(root: Path, *, vllm: str, sm: Sequence[int] = (), tp: Sequence[int] = ()) -> tuple[Finding, ...]:
    """The reports that fit a checkpoint in that vLLM on such GPUs; none where it cannot be read."""
    numbers = VERSION.match(vllm)
    if numbers is None:
        return ()
    version = (int(numbers["major"]), int(numbers["minor"]))
    try:
        with Reader() as reader:
            return tuple(run(CheckpointView(read_index(root), reader, Target(tp=tp, sm=sm, vllm=version))))
    except (InputError, OSError):  # which the load tells of
        return ()


def _fits(view: CheckpointView, report: KnownBad, version: str) -> bool:
    """Whether all that a report names is asked for and in the checkpoint."""
    if report.sm and not {*report.sm} & {*view.target.sm}:
        return False
    if not report.is_of(version, view.class_name, kv_cache=cache_scheme(view) is not None):
        return False
    return not report.schemes or any(
        group.input_activations is not None
        and report.is_about_layer(group.storage.vllm_scheme(group), group.weights.strategy, width)
        for group, width in _widths(view)
    )


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
