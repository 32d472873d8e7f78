"""What comes of a plan: what is quantized and what stays, bits, the GPUs that run it, time, disk."""

from collections.abc import Iterable, Mapping

from vexport.architectures import resolve
from vexport.architectures.fusion import fuse, moe_layer
from vexport.checkpoint.index import SourceIndex
from vexport.formats.gpus import generation
from vexport.formats.partition import is_head
from vexport.formats.schemes import get_scheme
from vexport.plan.blocks import quantized_bytes
from vexport.plan.estimates import Samples, estimates
from vexport.plan.linears import NUMBER, is_unknown_experts, names_of
from vexport.plan.needs import calibration_need
from vexport.types import KeptShare, Outlook, Plan

MOST_KINDS = 4


def outlook(index: SourceIndex, plan: Plan, samples: Samples, next_command: str) -> Outlook:
    """What comes of a plan that calibrates on so many samples; `next_command` is what to type then."""
    quantized = sum(one.out_features * one.in_features for group in plan.groups for one in group.members)
    least_sm, full_sm = gpus_of(plan.schemes)
    calibrated = calibration_need(plan) is not None
    packages = {scheme.format.gpu_support(scheme.args).package for scheme in map(get_scheme, plan.schemes)}
    return Outlook(
        quantized_parameters=quantized,
        kept=_kept(index, plan),
        bits_quantized=8 * quantized_bytes(index, plan.groups) / quantized if quantized else 0.0,
        bits=8 * plan.output_bytes / plan.parameters if plan.parameters else 0.0,
        least_sm=least_sm,
        full_sm=full_sm,
        generation=generation(least_sm) if least_sm else "any GPU",
        needs_calibration=calibrated,
        samples=str(samples) if calibrated else "",
        disk_bytes=plan.output_bytes + _side_bytes(index),
        estimates=estimates(index, plan, samples),
        next_command="" if plan.refusals else next_command,
        package=", ".join(sorted(packages - {""})),
    )


def gpus_of(schemes: Iterable[str]) -> tuple[int, int | None]:
    """The least capability that loads all of these schemes, and the least that runs all in full."""
    found = [scheme.format.gpu_support(scheme.args) for scheme in map(get_scheme, schemes)]
    full = [support.full_from for support in found]
    known = [sm for sm in full if sm is not None]
    loads_from = max((support.loads_from for support in found), default=0)
    return loads_from, max(known, default=0) if len(known) == len(full) else None


def _side_bytes(index: SourceIndex) -> int:
    """Bytes of the files that are copied; 0 of a model of the hub, of which only headers were fetched."""
    return sum(file.stat().st_size for file in index.side_files if file.is_file())


def _kept(index: SourceIndex, plan: Plan) -> tuple[KeptShare, ...]:
    """Kept parameters by reason, the most first."""
    reasons = _reasons(index, plan)
    tied = not any(is_head(name.removesuffix(".weight")) for name in index.tensors)
    names = names_of(index, resolve(index.architecture, index.config)[0])
    parameters: dict[str, int] = {}
    kinds: dict[str, dict[str, None]] = {}
    for name in plan.kept:
        tensor, module = index.tensors[name], name.rpartition(".")[0]
        if module in reasons:
            reason = reasons[module]
        elif names.architecture.is_table(module):
            reason = "embeddings, also the output head" if tied else "embeddings"
        elif is_unknown_experts(tensor, names):
            reason = "experts that vLLM loads in no quantized form"
        else:
            reason = "norms" if "norm" in module else "biases and others"
        parameters[reason] = parameters.get(reason, 0) + tensor.num_elements
        kinds.setdefault(reason, {})[NUMBER.sub("*", name)] = None
    shares = (
        KeptShare(reason=reason, parameters=number, kinds=tuple(kinds[reason])[:MOST_KINDS])
        for reason, number in parameters.items()
    )
    return tuple(sorted(shares, key=lambda share: -share.parameters))


def _reasons(index: SourceIndex, plan: Plan) -> Mapping[str, str]:
    """Why each linear layer stays, by its name."""
    architecture = resolve(index.architecture, index.config)[0]
    names = names_of(index, architecture)
    unsupported = {note.where for note in plan.notes if note.check == "shape"}
    reasons = {}
    for group, members in fuse(plan.kept_linears, architecture).items():
        for name in members:
            if is_head(name):
                reasons[name] = "output head"
            elif {group, name, moe_layer(name)} & unsupported:
                reasons[name] = "unsupported shape"
            elif names.place(name) == "decoder":
                reasons[name] = "kept by a rule or --ignore"
            else:
                reasons[name] = "routers, gates and what lies outside the decoder layers"
    return reasons
