"""Reads a written checkpoint back with compressed-tensors' own code and measures what was lost."""

from collections.abc import Callable, Iterator

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.smoothed import source_reader
from vexport.checkpoint.tensors import read_tensor, read_weight
from vexport.formats.dequantize import row_chunks, rows_of
from vexport.formats.schemes import get_scheme
from vexport.numerics.metrics import ErrorPower, quantization_error
from vexport.types import Finding, FusionGroup, LayerError, LinearPlan, Plan

CHECK = "roundtrip"


def layer_errors(
    source: SourceIndex,
    written: SourceIndex,
    plan: Plan,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LayerError, ...]:
    """Signal-to-noise of every quantized weight against the source's, in plan order, a few rows at a time."""
    total = sum(len(group.members) for group in plan.groups)
    errors: list[LayerError] = []
    with source_reader(written.root) as old, Reader() as new:
        for group in plan.groups:
            for member in group.members:
                found = _layer_error(source, written, group, member, old, new)
                errors.append(LayerError(name=member.name, scheme=group.scheme, snr_db=found))
                on_layer(len(errors), total)
    return tuple(errors)


def _layer_error(
    source: SourceIndex,
    written: SourceIndex,
    group: FusionGroup,
    member: LinearPlan,
    old: Reader,
    new: Reader,
) -> float:
    """In dB. The pages that were read are given back."""
    scheme, tensor = get_scheme(group.scheme), source.tensors[member.weight]
    weight = read_weight(old, tensor, member.part)
    tensors = [written.tensors[spec.name] for spec in scheme.layout(member, tensor.dtype)]
    stored = {one.name.rpartition(".")[2]: read_tensor(new, one) for one in tensors}
    found = ErrorPower()
    for rows in row_chunks(member.out_features, member.in_features):
        back = scheme.format.dequantize(scheme.args, rows_of(stored, scheme.args.weights, rows))
        found += quantization_error(weight[rows], back)
    old.release([tensor])
    new.release(tensors)
    return found.sqnr_db


def changed_tensors(source: SourceIndex, written: SourceIndex, plan: Plan) -> Iterator[Finding]:
    """An error finding for every kept tensor whose bytes are not those of the source."""
    with source_reader(written.root) as old, Reader() as new:
        for name in plan.kept:
            tensor, copy = source.tensors[name], written.tensors.get(name)
            if copy is None or not same_bytes(old, tensor, new, copy):
                yield Finding(
                    check=CHECK,
                    severity="error",
                    where=name,
                    expected="the bytes of the source",
                    got="no such tensor" if copy is None else "other bytes",
                    fix="export the checkpoint again",
                )
