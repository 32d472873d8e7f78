"""Would vLLM run the checkpoint on so many ranks and on such GPUs, and in the precision that is stored?

Asked by `--tp` and `--sm`. The rules of shapes by rank are those of the plan; the rest is vLLM's choice of
kernels, as its dry load shows it; sides that are too small for a kernel are not known here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vexport.architectures.text_config import text_config
from vexport.checks.vllm.expected import linear_shape
from vexport.checks.vllm.view import CheckpointView, ConfigGroup, FusedLinear, error, warning
from vexport.plan.linears import Names, names_of
from vexport.plan.ranks import heads_of
from vexport.plan.shapes import misfit_on
from vexport.schemes import fp8, integer, mxfp, nvfp4
from vexport.schemes.base import Family, Scheme, SchemeArgs
from vexport.types import Finding, FusionGroup, LinearPlan, TensorInfo

NAME = "devices"
DESCRIPTION = "heads, groups and blocks fit the ranks (--tp), schemes run as stored on the GPUs (--sm)"
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Widths of packed integers that vLLM's own kernels run (MarlinLinearKernel, MacheteLinearKernel).
OWN_WIDTHS = (4, 8)
WEIGHT_ONLY = 16
# Of what no GPU runs, every capability is too high.
NO_GPU = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Where vLLM runs a scheme: the least capability, and bits of activations from `full_sm` on and below.

    `below_sm` is the first capability that no longer runs it; `package` what must be installed.
    """

    family: Family
    least_sm: int
    full_sm: int
    full_bits: int
    lower_bits: int = WEIGHT_ONLY
    below_sm: int | None = None
    package: str = ""

    def refuses(self, sm: int) -> bool:
        """Whether vLLM raises on such a GPU."""
        return sm < self.least_sm or (self.below_sm is not None and sm >= self.below_sm)

    def bits(self, sm: int) -> int:
        """The bits of the activations that are multiplied."""
        return self.full_bits if sm >= self.full_sm else self.lower_bits


def runs_of(group: ConfigGroup) -> Runs:
    """Source: `get_min_capability` of the schemes, the kernels of vllm/model_executor/kernels/linear and
    compressed_tensors.py, which puts W8A16 in the place of W8A8 below SM 89. CUTLASS's INT8 is chosen from
    SM 100 on too, where it raises when it runs (scaled_mm_helper.hpp). INT4 in bytes has a kernel on CPUs
    only (dynamic_4bit.py, which CompressedTensorsW4A8Int asks for)."""
    weights, inputs = group.weights, group.input_activations
    if weights.strategy == "tensor_group":
        return Runs(family=nvfp4.FAMILY, least_sm=75, full_sm=100, full_bits=4 if inputs else WEIGHT_ONLY)
    if weights.type == "float" and weights.strategy == "group":
        if weights.num_bits == 4:
            return Runs(family=mxfp.MXFP4_FAMILY, least_sm=80, full_sm=100, full_bits=4)
        return Runs(family=mxfp.MXFP8_FAMILY, least_sm=75, full_sm=100, full_bits=8)
    if weights.type == "float":
        full_sm = 90 if weights.strategy == "block" else 89
        return Runs(family=fp8.FAMILY, least_sm=75, full_sm=full_sm, full_bits=8 if inputs else WEIGHT_ONLY)
    if group.format != "pack-quantized" and weights.num_bits != 8:
        return Runs(family=integer.W4A8_FAMILY, least_sm=0, full_sm=0, full_bits=8, below_sm=NO_GPU)
    if group.format != "pack-quantized":
        return Runs(family=integer.W8A8_FAMILY, least_sm=75, full_sm=75, full_bits=8, below_sm=100)
    if inputs is not None and inputs.type == "float":
        return Runs(family=integer.W4AFP8_FAMILY, least_sm=90, full_sm=90, full_bits=8, below_sm=100)
    family = integer.W4A8_FAMILY if inputs else integer.WNA16_FAMILY
    package = "" if weights.num_bits in OWN_WIDTHS else "humming-kernels"
    return Runs(family=family, least_sm=75, full_sm=75, full_bits=WEIGHT_ONLY, package=package)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings for the ranks and capabilities that were asked for."""
    if view.target.tp and view.architecture.row_parallel:
        yield from _ranks(view)
    for group, fused_linears in _by_group(view):
        yield from _capabilities(view, group, fused_linears)


def _ranks(view: CheckpointView) -> Iterator[Finding]:
    names = names_of(view.index, view.architecture)
    for ranks in view.target.tp:
        yield from _heads(view, names, ranks)
        yield from _shapes(view, names, ranks)


def _heads(view: CheckpointView, names: Names, ranks: int) -> Iterator[Finding]:
    text = text_config(view.index.config)
    linears = (name for fused in view.fused_linears for name in fused.members)
    heads = heads_of(linears, names, text)
    got = heads.uneven(ranks)
    if got:
        yield error(
            NAME,
            f"{view.config_path} (tp {ranks})",
            expected=f"heads that {ranks} ranks can share, or of which each holds one",
            got=got,
            fix=f"serve it on {heads.possible_ranks} GPUs",
        )


def _shapes(view: CheckpointView, names: Names, ranks: int) -> Iterator[Finding]:
    text = text_config(view.index.config)
    found: dict[tuple[str, str], int] = {}
    for fused in view.fused_linears:
        group = view.group_of(fused) if fused.is_quantized else None
        layers = [_linear(name, parameters, group) for name, parameters in fused.members.items()]
        members = tuple(layer for layer in layers if layer is not None)
        if len(members) < len(layers) or not members:
            continue
        if group is None and any(names.place(member.name) != "decoder" for member in members):
            continue
        planned = FusionGroup(name=fused.name, scheme=NAME, observer="", members=members)
        reason = misfit_on(planned, _scheme(group), names, ranks, text)
        if reason:
            key = (INDEX.sub("*", fused.name), reason)
            found[key] = found.get(key, 0) + 1
    for (kind, reason), count in found.items():
        yield error(
            NAME,
            f"{kind} ({_layers(count)}, tp {ranks})",
            expected="parts that each rank can hold and run",
            got=reason,
            fix="serve it on another number of GPUs, or quantize these layers otherwise",
        )


def _linear(name: str, parameters: Mapping[str, TensorInfo], group: ConfigGroup | None) -> LinearPlan | None:
    """A layer with its sides; None where they cannot be told."""
    weight = parameters.get("weight")
    sides = linear_shape(group, parameters) if group else weight.shape if weight is not None else None
    if sides is None or len(sides) != 2:
        return None
    return LinearPlan(name=name, weight=name, out_features=sides[0], in_features=sides[1])


def _scheme(group: ConfigGroup | None) -> Scheme | None:
    if group is None:
        return None
    args = SchemeArgs(weights=group.weights, input_activations=group.input_activations)
    return Scheme(name=group.name, args=args, family=runs_of(group).family)


def _by_group(view: CheckpointView) -> list[tuple[ConfigGroup, list[FusedLinear]]]:
    found: dict[str, tuple[ConfigGroup, list[FusedLinear]]] = {}
    for fused in view.fused_linears if view.target.sm else ():
        group = view.group_of(fused)
        if group is not None and fused.is_quantized:
            found.setdefault(group.name, (group, []))[1].append(fused)
    return list(found.values())


def _capabilities(
    view: CheckpointView, group: ConfigGroup, fused_linears: list[FusedLinear]
) -> Iterator[Finding]:
    runs, capabilities = runs_of(group), view.target.sm
    stored = group.input_activations.num_bits if group.input_activations else WEIGHT_ONLY
    weights = group.weights.num_bits
    layers = f"{INDEX.sub('*', fused_linears[0].name)} and all of {group.name} ({_layers(len(fused_linears))}"
    refusing = [sm for sm in capabilities if runs.refuses(sm)]
    if refusing:
        need = f"SM {runs.least_sm} " + (f"to below {runs.below_sm}" if runs.below_sm else "or above")
        need = "a CPU" if runs.below_sm == NO_GPU else need
        yield error(
            NAME,
            f"{layers}, sm {_listed(refusing)})",
            expected=f"{need} for W{weights}A{stored} ({group.format})",
            got="a GPU on which vLLM refuses the scheme",
            fix="serve it elsewhere, or quantize it otherwise",
        )
    running = [sm for sm in capabilities if not runs.refuses(sm)]
    for bits in dict.fromkeys(runs.bits(sm) for sm in running):
        if bits != stored:
            yield warning(
                NAME,
                f"{layers}, sm {_listed([sm for sm in running if runs.bits(sm) == bits])})",
                expected=f"W{weights}A{stored}, as it is stored",
                got=f"W{weights}A{bits}: vLLM has no kernel for the former there, and says nothing",
                fix="measure accuracy and speed at that precision, or serve it elsewhere",
            )
    if running and runs.package:
        yield warning(
            NAME,
            f"{layers}, sm {_listed(running)})",
            expected="a width that vLLM's own kernels run (4 or 8 bits)",
            got=f"{weights} bits, for which it needs the package {runs.package}",
            fix=f"install {runs.package} beside vLLM",
        )


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _listed(capabilities: list[int]) -> str:
    return "/".join(map(str, capabilities))
