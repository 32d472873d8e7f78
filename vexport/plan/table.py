"""The comparison of all schemes for one model, from headers alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vexport.architectures import resolve
from vexport.architectures.config import text_config
from vexport.checkpoint.dtypes import num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.formats.gpus import generation
from vexport.formats.schemes import get_scheme, with_group_size
from vexport.layers.blocks import group_layout
from vexport.layers.linears import Names, names_of
from vexport.layers.shapes import kind_of_group, unsupported
from vexport.plan.build import PlanSettings, build_plan
from vexport.plan.group_sizes import fitting_sizes
from vexport.records import FusionGroup, Plan, SchemeOutlook, SchemeTable
from vexport.scenario import Rule

# The scheme whose plan says which layers a rule for all linear layers reaches; any would do.
PROBE = "FP8_DYNAMIC"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Fused layers alike in names and sizes: one of them, how many there are, their bytes unquantized."""

    group: FusionGroup
    number: int
    source_bytes: int


def scheme_table(
    index: SourceIndex, kept: Sequence[Rule], settings: PlanSettings, schemes: Sequence[str]
) -> SchemeTable:
    """Each of the schemes for all linear layers but those that the rules in `kept` keep.

    Raises InputError for a source that cannot be a source, as `build_plan` does.
    """
    plan = build_plan(index, (*kept, Rule(match="Linear", scheme=PROBE)), settings)
    names = names_of(index, resolve(index.architecture, index.config)[0])
    kinds = _kinds(index, plan)
    # What stays in every scheme: copied tensors and scales of the KV cache.
    rest = plan.output_bytes - sum(kind.number * _stored(index, kind.group, PROBE) for kind in kinds)
    refused = next((str(refusal.got) for refusal in plan.refusals if refusal.check != "shape"), "")

    def outlook(name: str) -> SchemeOutlook:
        return _outlook(name, index, plan, names, kinds, settings, rest=rest, refused=refused)

    return SchemeTable(
        source=plan.source,
        architecture=plan.architecture,
        parameters=plan.parameters,
        source_bytes=plan.source_bytes,
        layers=sum(kind.number * len(kind.group.members) for kind in kinds),
        schemes=tuple(each for name in schemes for each in _with_fitting(outlook(name), outlook)),
    )


def _with_fitting(first: SchemeOutlook, outlook: Callable[[str], SchemeOutlook]) -> Iterator[SchemeOutlook]:
    """A scheme, and in its largest groups that fit where its own do not."""
    yield first
    if first.group_sizes:
        yield outlook(with_group_size(first.scheme, first.group_sizes[0]))


def _kinds(index: SourceIndex, plan: Plan) -> list[_Kind]:
    """The groups of a plan by kind and dtype."""
    groups: dict[tuple[object, ...], FusionGroup] = {}
    counted: Counter[tuple[object, ...]] = Counter()
    for group in plan.groups:
        dtypes = tuple(index.tensors[member.weight].dtype for member in group.members)
        key = (kind_of_group(group), dtypes)
        groups.setdefault(key, group)
        counted[key] += 1
    return [
        _Kind(group=group, number=counted[key], source_bytes=_unquantized(index, group))
        for key, group in groups.items()
    ]


def _unquantized(index: SourceIndex, group: FusionGroup) -> int:
    return sum(
        num_bytes(index.tensors[member.weight].dtype, (member.out_features, member.in_features))
        for member in group.members
    )


def _stored(index: SourceIndex, group: FusionGroup, scheme: str) -> int:
    specs = group_layout(replace(group, scheme=scheme), index.tensors)
    return sum(num_bytes(spec.dtype, spec.shape) for spec in specs)


def _outlook(
    name: str,
    index: SourceIndex,
    plan: Plan,
    names: Names,
    kinds: Sequence[_Kind],
    settings: PlanSettings,
    *,
    rest: int,
    refused: str,
) -> SchemeOutlook:
    scheme = get_scheme(name)
    support = scheme.format.gpu_support(scheme.args)
    groups = [replace(kind.group, scheme=name) for kind in kinds]
    reasons = unsupported(groups, names, settings.ranks, text_config(index.config))
    size, layers = rest, 0
    for kind in kinds:
        fits = kind.group.name not in reasons
        size += kind.number * (_stored(index, kind.group, name) if fits else kind.source_bytes)
        layers += kind.number * len(kind.group.members) * fits
    reason = next(iter(reasons.values()), "")
    sizes = fitting_sizes(groups, names, settings.ranks, text_config(index.config)) if reason else ()
    if sizes:
        reason = f"{reason}; --group-size {' or '.join(map(str, sizes))} fits"
    reason = refused or reason or ("" if kinds else "no linear layer to quantize")
    return SchemeOutlook(
        scheme=name,
        fits=not reason,
        reason=reason,
        layers=layers,
        output_bytes=size,
        bits=8 * size / plan.parameters,
        needs_calibration=scheme.args.calibrated or bool(plan.attention),
        least_sm=support.loads_from,
        full_sm=support.full_from,
        generation=generation(support.loads_from),
        group_sizes=sizes,
    )
