"""The layers that vLLM runs on a GPU: kernels and sizes, for the search of known faults."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from vexport.architectures import with_stars
from vexport.architectures.faults import LayerGroup, RunningLayer
from vexport.architectures.fusion import FusedLayer, is_head
from vexport.architectures.gpu_cells import Part, RecordedCell, recorded_schemes
from vexport.architectures.linears import Names
from vexport.architectures.ranks import on_all_ranks, parts_of, split_of, uneven
from vexport.formats import nearest_format, written_format
from vexport.formats.arguments import Arguments, SchemeArgs, precision
from vexport.formats.base import partition_of
from vexport.formats.schemes import canonical_name, parse_canonical_name
from vexport.records import LinearPlan
from vexport.version import Version

# vLLM pads the rows of an output head to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE in
# vocab_parallel_embedding.py).
_HEAD_ROWS = 64


def running_layer(
    layer: FusedLayer,
    members: Sequence[LinearPlan] | None,
    names: Names,
    *,
    ranks: int,
    stored: str,
) -> RunningLayer:
    """Return a fused layer without its kernel, as a rank runs it.

    `members` are its linear layers with their sizes, or None if a size is unknown. `stored` is the
    precision, such as W4A16.
    """
    group: LayerGroup = "head" if is_head(layer.name) else "linear"
    if layer.experts is not None:
        group = "experts"
    return RunningLayer(
        name=with_stars(layer.name),
        group=group,
        kernel="",
        stored=stored,
        sides=_sides(layer, members, names, ranks) if members and group != "experts" else (),
        gated=_has_gate(names),
    )


def _has_gate(names: Names) -> bool:
    experts = names.architecture.experts
    return experts is None or experts.up is not None


def _sides(
    layer: FusedLayer, members: Sequence[LinearPlan], names: Names, ranks: int
) -> tuple[int, ...]:
    split = split_of(layer, names)
    parts = [on_all_ranks(part, ranks, names.text) for part in parts_of(layer, members, names)]
    if uneven(parts, ranks, split):
        return ()
    part = partition_of(parts, ranks, split)
    rows = sum(part.out_features)
    if is_head(layer.name):
        rows = -(-rows // _HEAD_ROWS) * _HEAD_ROWS // ranks
    return rows, part.in_features


def on_gpu(layer: RunningLayer, version: Version, args: Arguments, sm: int) -> RunningLayer | None:
    """Return the layer with the kernel that vLLM selects for its scheme on a GPU.

    The record of dry loads decides (`gpu_cells.py`). If the scheme is not recorded, recorded
    schemes of the same kind decide if they agree. Return None if nothing is recorded, if these
    schemes differ, or if vLLM refuses the scheme.
    """
    cells = (_cell(version, args, sm, part) for part in _parts(layer))
    cell = next(filter(None, cells), None)
    if cell is None or not cell.kernel:
        return None
    return replace(
        layer, kernel=cell.kernel, runs=cell.precision, blocks=args.weights.block is not None
    )


def _parts(layer: RunningLayer) -> Iterator[Part]:
    """Yield the recorded parts of a model that decide about a layer, the best first."""
    if layer.group != "experts":
        yield "layers"
        return
    if not layer.gated:
        yield "ungated experts"
    yield "experts"


def _cell(version: Version, args: Arguments, sm: int, part: Part) -> RecordedCell | None:
    exact = SchemeArgs(weights=args.weights, input_activations=args.input_activations)
    recorded, name, kind = _by_arguments(version, part), canonical_name(exact), _kind(exact)
    if name in recorded:
        return recorded[name].get(sm)
    alike = {
        cells[sm]
        for other, cells in recorded.items()
        if sm in cells
        and (parsed := parse_canonical_name(other)) is not None
        and _kind(parsed) == kind
    }
    return alike.pop() if len(alike) == 1 else None


@cache
def _by_arguments(version: Version, part: Part) -> Mapping[str, Mapping[int, RecordedCell]]:
    return {
        scheme.args: scheme.cells
        for scheme in recorded_schemes(version)
        if scheme.args and scheme.part == part
    }


def _kind(args: SchemeArgs) -> tuple[str, str, bool, bool]:
    """Return what schemes with the same kernels have in common.

    It is the class of vLLM that runs them, the precision, and whether there are zero points and
    vLLM's own kernels for the group size.
    """
    weights, storage = args.weights, written_format(args) or nearest_format(args, "")
    grouped = weights.group in storage.group_sizes(args)
    return storage.vllm_scheme(args), precision(args), weights.symmetric, grouped
