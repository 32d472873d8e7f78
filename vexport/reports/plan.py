"""A plan for people: what is quantized how, what it will weigh, what vLLM would refuse."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence

from vexport.files import to_json
from vexport.formats.gpus import generation
from vexport.formats.schemes import get_scheme
from vexport.plan.linears import NUMBER
from vexport.reports.formatting import count, duration, plural, ratio, size
from vexport.types import Finding, FusionGroup, Outlook, Plan, SchemeTable

# Lines of text; a plan as JSON has everything.
MOST_KINDS = 16
MOST_REASONS = 6
# Reasons to keep layers of which a reader wants to know the layers.
WORTH_NAMING = ("unsupported shape", "kept by a rule or --ignore")


def render_plan(plan: Plan, outlook: Outlook, format_: str) -> str:
    """The plan as text or JSON (plan.schema.json), with a final newline."""
    if format_ == "json":
        merged = {**json.loads(to_json(plan)), "outlook": json.loads(to_json(outlook))}
        return json.dumps(merged, indent=2) + "\n"
    return _text(plan, outlook)


def render_next(outlook: Outlook) -> str:
    """The line of a plan that says what to type then; nothing where the plan is refused."""
    return _line("next", outlook.next_command) if outlook.next_command else ""


def render_table(table: SchemeTable, format_: str) -> str:
    """What each scheme would give, as text or JSON (plan-schemes.schema.json), with a final newline."""
    if format_ == "json":
        return to_json(table)
    name = max(len(one.scheme) for one in table.schemes)
    lines = [
        f"{table.source}: {table.architecture}, {count(table.parameters)} parameters, "
        f"{size(table.source_bytes)}, {plural(table.layers, 'linear layer')}",
        f"  {'scheme':<{name}}  {'size':>8}  {'bits':>5}  {'data':<6}  {'loads from':<15}  "
        f"{'in full from':<18}  fits",
    ]
    for one in table.schemes:
        data = "needed" if one.needs_calibration else "no"
        verdict = "yes" if one.fits else f"no: {one.reason}{_part(one.layers, table.layers)}"
        lines.append(
            f"  {one.scheme:<{name}}  {size(one.output_bytes):>8}  {one.bits:>5.2f}  {data:<6}  "
            f"{one.generation:<15}  {full_from(one.full_sm):<18}  {verdict}"
        )
    lines += [
        "",
        "bits: over all weights; data: calibration text; in full from: the least GPU on which vLLM "
        "multiplies inputs of as many bits as are stored; where it does not fit, the size is that with "
        "--on-unsupported-shape keep.",
        f"next: vexport plan {shlex.quote(table.source)} --scheme SCHEME",
    ]
    return "\n".join(lines) + "\n"


def full_from(sm: int | None) -> str:
    """The least GPU that runs what is stored in full."""
    return "no GPU" if sm is None else generation(sm)


def _in_full(outlook: Outlook) -> str:
    """From where inputs are quantized as stored, where that is not all GPUs that load it."""
    if outlook.full_sm is None:
        return ", none with inputs as they are stored"
    later = outlook.full_sm > outlook.least_sm
    return f"; inputs as they are stored from {generation(outlook.full_sm)} on" if later else ""


def _part(layers: int, of: int) -> str:
    return f" ({count(layers)} of {count(of)} layers fit)" if 0 < layers < of else ""


def _line(label: str, text: str) -> str:
    return f"  {label:<12} {text}\n"


def _outlook_lines(plan: Plan, outlook: Outlook) -> list[str]:
    kept = sum(share.parameters for share in outlook.kept)
    lines = [f"{count(kept)} of {count(plan.parameters)} weights ({ratio(kept, plan.parameters)})"]
    for share in outlook.kept[:MOST_REASONS]:
        kinds = f": {', '.join(share.kinds)}" if share.reason in WORTH_NAMING else ""
        lines.append(f"  {count(share.parameters)} {share.reason}{kinds}")
    return lines


def _stages(outlook: Outlook) -> str:
    return ", ".join(
        f"{one.stage} {duration(one.seconds)} in {size(one.memory_bytes)}" for one in outlook.estimates
    )


def _text(plan: Plan, outlook: Outlook) -> str:
    lines = [f"{plan.source}: {plan.architecture}, {count(plan.parameters)} parameters"]
    for scheme in plan.schemes:
        groups = [group for group in plan.groups if group.scheme == scheme]
        layers = sum(len(group.members) for group in groups)
        stored = get_scheme(scheme).format.name
        lines.append(
            f"  {scheme:<12} {plural(layers, 'linear layer')} in {plural(len(groups), 'group')} ({stored})"
        )
        lines += [f"  {'':<12}   {kind}" for kind in _shortened(_group_kinds(groups), MOST_KINDS)]
    first, *others = _outlook_lines(plan, outlook)
    lines += [f"  {'stay 16 bit':<12} {first}", *(f"  {'':<12} {line}" for line in others)]
    if plan.kv_cache:
        lines.append(
            f"  {'KV cache':<12} {plan.kv_cache} in {plural(len(plan.attention), 'attention layer')}"
        )
    change = f"{size(plan.source_bytes)} -> {size(plan.output_bytes)}"
    share = ratio(plan.output_bytes, plan.source_bytes)
    lines += [
        f"  {'size':<12} {change} ({share}); {outlook.bits_quantized:.2f} bits per quantized weight, "
        f"{outlook.bits:.2f} over all",
        f"  {'calibration':<12} {_calibration(outlook)}",
        f"  {'runs from':<12} {outlook.generation} on{_in_full(outlook)}",
        f"  {'estimates':<12} about {_stages(outlook)}; {size(outlook.disk_bytes)} of disk",
        f"  {'':<12} (on two idle CPU cores, files in memory{_faster(outlook)})",
    ]
    lines += [f"  {'note':<12} {note}" for note in _findings(plan.notes)]
    lines += [f"  {'refused':<12} {refusal}" for refusal in _findings(plan.refusals)]
    return "\n".join(lines) + "\n"


def _faster(outlook: Outlook) -> str:
    return "; a GPU calibrates faster" if outlook.needs_calibration else ""


def _calibration(outlook: Outlook) -> str:
    if not outlook.needs_calibration:
        return "not needed"
    return f"needed; {next(one.basis for one in outlook.estimates if one.stage == 'calibrate')}"


def kind_of(name: str) -> str:
    """What a layer is, wherever it stands: `model.layers.*.mlp.experts.*.down_proj`."""
    return NUMBER.sub("*", name)


def _group_kinds(groups: Sequence[FusionGroup]) -> list[str]:
    """How many of each kind of group there are, and what vLLM fuses in it."""
    members = {kind_of(group.name): group.members for group in groups}
    kinds = Counter(kind_of(group.name) for group in groups)
    return [
        f"{count(number)} x {kind}{_fused([member.name for member in members[kind]])}"
        for kind, number in kinds.items()
    ]


def _fused(members: Sequence[str]) -> str:
    leaves = [member.rpartition(".")[2] for member in members]
    return f" = {' + '.join(leaves)}" if len(leaves) > 1 else ""


def _findings(findings: Sequence[Finding]) -> list[str]:
    """One line a kind of layer and reason, with how many there are."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((kind_of(finding.where), finding.got), []).append(finding)
    lines = [
        f"{same[0]}{f' and {count(len(same) - 1)} more like it' if len(same) > 1 else ''}"
        for same in alike.values()
    ]
    return _shortened(lines, MOST_KINDS)


def _shortened(lines: Sequence[str], most: int) -> list[str]:
    left = len(lines) - most
    return [*lines[:most], f"and {count(left)} more kinds"] if left > 0 else list(lines)
