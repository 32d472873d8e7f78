"""From headers, rules and the architecture's fused modules to a plan; no tensor data is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vexport.architectures import FusedModules, fused_modules
from vexport.checkpoint.dtypes import FLOATING, num_bytes
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError, raise_all
from vexport.scenario import Rule
from vexport.schemes import KEEP, get_scheme
from vexport.types import Finding, FusionGroup, LinearPlan, Plan, TensorInfo, TensorSpec

# What every producer leaves unquantized unless a rule names it: output head, embeddings, norms, routers.
KEPT_BY_DEFAULT = re.compile(
    r"(.*\.)?(lm_head|embed_out|embed_tokens|embed_positions|word_embeddings|wte|wpe|router|gate|[\w]*norm[\w]*)$"
)
EXPERTS = re.compile(r".*\.experts(\.|$)")


class Treatment(NamedTuple):
    """What a rule does to a layer."""

    scheme: str
    observer: str


def build_plan(index: SourceIndex, rules: Sequence[Rule]) -> Plan:
    """Decide for every tensor of a checkpoint whether and how it is quantized.

    Layers that vLLM fuses form one group. What vLLM would not run is a refusal in the plan, not an
    exception. Raises InputError for a source that cannot be a source (quantized, unknown class).
    """
    _require_plain(index)
    fused = fused_modules(index.architecture)
    linears = {linear.name: linear for linear in find_linears(index)}
    _require_matching_rules(rules, linears)
    chosen = {name: choose_rule(rules, name) for name in linears}
    groups: list[FusionGroup] = []
    refusals: list[Finding] = []
    for name, members in group_members(linears, fused).items():
        treatments = {chosen[member.name] for member in members}
        treatment = treatments.pop()
        if treatments:
            refusals.append(_mixed_group(name, members))
        elif treatment is not None:
            group = FusionGroup(
                name=name, scheme=treatment.scheme, observer=treatment.observer, members=members
            )
            refusals.extend(_misfits(group))
            groups.append(group)
    quantized = {member.name for group in groups for member in group.members}
    weights = {member.weight for group in groups for member in group.members}
    return Plan(
        source=str(index.root),
        architecture=index.architecture,
        groups=tuple(groups),
        kept=tuple(name for name in index.tensors if name not in weights),
        kept_linears=tuple(name for name in linears if name not in quantized),
        source_bytes=index.num_bytes,
        output_bytes=sum(output_bytes(index, groups)),
        parameters=index.num_parameters,
        refusals=tuple(refusals),
    )


def require_accepted(plan: Plan) -> None:
    """Raise InputError with the first refusal of a plan and how many more there are, if there is one."""
    if not plan.refusals:
        return
    first, *rest = plan.refusals
    more = f" ({len(rest)} more: see `vexport plan`)" if rest else ""
    raise InputError(first.where, got=first.got, need=first.expected, fix=first.fix + more)


def find_linears(index: SourceIndex) -> Iterator[LinearPlan]:
    """The linear layers among the tensors: two-dimensional floating-point weights that are no embedding."""
    for tensor in index.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        if (
            leaf == "weight"
            and len(tensor.shape) == 2
            and tensor.dtype in FLOATING
            and not is_embedding(module)
        ):
            rows, columns = tensor.shape
            yield LinearPlan(name=module, weight=tensor.name, out_features=rows, in_features=columns)


def is_embedding(module: str) -> bool:
    """Whether a module with a two-dimensional weight is a table of embeddings by its name."""
    leaf = module.rpartition(".")[2]
    return leaf.startswith("embed") and leaf != "embed_out" or leaf in ("wte", "wpe", "word_embeddings")


def choose_rule(rules: Sequence[Rule], name: str) -> Treatment | None:
    """Scheme and observer of the first rule that matches a linear layer; None where it stays unquantized.

    What is kept by default is quantized only by a rule that names it rather than all linear layers.
    """
    for rule in rules:
        if rule.match == "Linear" and KEPT_BY_DEFAULT.match(name):
            continue
        if matches(rule.match, name):
            return None if rule.scheme == KEEP else Treatment(rule.scheme, rule.observer)
    return None


def matches(pattern: str, name: str) -> bool:
    """Whether a rule's pattern covers a linear layer's name."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith(f".{pattern}")


def group_members(linears: dict[str, LinearPlan], fused: FusedModules) -> dict[str, tuple[LinearPlan, ...]]:
    """Linear layers by the module that vLLM makes of them, members in vLLM's order."""
    owner = {member: name for name, members in fused.items() for member in members}
    groups: dict[str, list[LinearPlan]] = {}
    for linear in linears.values():
        prefix, dot, leaf = linear.name.rpartition(".")
        groups.setdefault(prefix + dot + owner.get(leaf, leaf), []).append(linear)
    return {
        name: tuple(sorted(members, key=lambda member: _position(member, name, fused)))
        for name, members in groups.items()
    }


def _position(member: LinearPlan, group: str, fused: FusedModules) -> int:
    order = fused.get(group.rpartition(".")[2], ())
    leaf = member.name.rpartition(".")[2]
    return order.index(leaf) if leaf in order else 0


def blocks(index: SourceIndex, groups: Sequence[FusionGroup]) -> Iterator[FusionGroup | TensorInfo]:
    """What the output is made of, in the order of the source: groups to quantize and tensors to copy.

    A group comes where the first of its weights is stored; experts that are stored in one tensor come
    there one after the other.
    """
    groups_of: dict[str, dict[str, FusionGroup]] = {}
    for group in groups:
        for member in group.members:
            groups_of.setdefault(member.weight, {})[group.name] = group
    done: set[str] = set()
    for tensor in index.tensors.values():
        if tensor.name not in groups_of:
            yield tensor
        for name, group in groups_of.get(tensor.name, {}).items():
            if name not in done:
                done.add(name)
                yield group


def output_blocks(index: SourceIndex, groups: Sequence[FusionGroup]) -> Iterator[tuple[TensorSpec, ...]]:
    """The tensors to be written, one tuple a block."""
    for block in blocks(index, groups):
        if isinstance(block, FusionGroup):
            yield group_layout(block, index.tensors)
        else:
            yield (TensorSpec(name=block.name, dtype=block.dtype, shape=block.shape),)


def group_layout(group: FusionGroup, tensors: Mapping[str, TensorInfo]) -> tuple[TensorSpec, ...]:
    """The tensors that replace a group's weights, member by member."""
    scheme = get_scheme(group.scheme)
    return tuple(
        spec for member in group.members for spec in scheme.layout(member, tensors[member.weight].dtype)
    )


def output_bytes(index: SourceIndex, groups: Sequence[FusionGroup]) -> Iterator[int]:
    """Bytes of each tensor to be written."""
    for block in output_blocks(index, groups):
        for spec in block:
            yield num_bytes(spec.dtype, spec.shape)


def _require_plain(index: SourceIndex) -> None:
    place = str(index.root)
    if "quantization_config" in index.config:
        raise InputError(
            place,
            got="a quantized checkpoint",
            need="an unquantized source",
            fix="start from the original model",
        )
    experts = next((name for name in index.tensors if EXPERTS.match(name)), None)
    if experts:
        raise InputError(
            f"{place}: {experts}",
            got="a mixture of experts",
            need="a dense model",
            fix="quantize a dense model; experts are not supported yet",
        )


def _require_matching_rules(rules: Sequence[Rule], linears: dict[str, LinearPlan]) -> None:
    raise_all(
        [
            InputError(
                f"rule {rule.match!r}",
                got="no layer that it matches",
                need="the name of a linear layer, the end of one, `re:...` or Linear",
                fix="correct the pattern or remove the rule",
            )
            for rule in rules
            if not _may_match_nothing(rule) and not any(matches(rule.match, name) for name in linears)
        ]
    )


def _may_match_nothing(rule: Rule) -> bool:
    """A rule that keeps what some models do not have: a tied output head, say."""
    return rule.scheme == KEEP and KEPT_BY_DEFAULT.match(rule.match) is not None


def _misfits(group: FusionGroup) -> Iterator[Finding]:
    scheme = get_scheme(group.scheme)
    for member in group.members:
        misfit = scheme.misfit(member)
        leaf = member.name.rpartition(".")[2]
        if misfit:
            yield Finding(
                check="shape",
                severity="error",
                where=member.name,
                expected=f"a shape that {scheme.name} can store",
                got=misfit,
                fix=f"add a rule with scheme: keep for {leaf}, or choose another scheme",
            )


def _mixed_group(name: str, members: Sequence[LinearPlan]) -> Finding:
    names = ", ".join(member.name.rpartition(".")[2] for member in members)
    return Finding(
        check="fusion",
        severity="error",
        where=name,
        expected=f"one scheme for {names}, which vLLM runs as one layer",
        got="rules that treat them differently",
        fix=f"give {names} the same rule",
    )
