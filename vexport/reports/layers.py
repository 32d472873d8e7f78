"""Weights and layers in a page's sections: sizes, rounding, signal-to-noise, sensitivity, drift; how weights
were rounded in sentences and findings too.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from vexport.records import (
    Attribution,
    Drift,
    Finding,
    GroupSensitivities,
    KindSize,
    LayerError,
    MixedScheme,
    PromptDrift,
    Report,
)
from vexport.records.rounding import GroupRounding, RoundingReport
from vexport.reports import document as doc
from vexport.reports.document import PAGE, badge, columns, muted, parts, row
from vexport.reports.folding import folded_places
from vexport.reports.formatting import bits_per_weight, count, decibels, percent, plural, ratio, size, small
from vexport.reports.sentences import attribution_line, schemes_in_use

MAX_LAYERS = 400
MAX_NAMED = 4


def size_section(report: Report) -> doc.Section:
    """The sizes before and after, and by kind of layer."""
    plan = report.plan
    kept = f": {folded_places(plan.kept_linears)}" if plan.kept_linears else ""
    layers = count(sum(len(group.members) for group in plan.groups))
    lead = (
        f"{layers} linear layers quantized in {count(len(plan.groups))} fusion groups "
        f"({schemes_in_use(plan)}); {count(len(plan.kept_linears))} kept{kept}."
    )
    before, after = (bits_per_weight(n, plan.parameters) for n in (plan.source_bytes, plan.output_bytes))
    whole = KindSize(kind="checkpoint", source_bytes=plan.source_bytes, output_bytes=plan.output_bytes)
    rows = (
        row(
            kind.kind,
            size(kind.source_bytes),
            size(kind.output_bytes),
            ratio(kind.output_bytes, kind.source_bytes),
        )
        for kind in (*report.sizes, whole)
    )
    table = doc.Table(columns("Kind", ">Source", ">Quantized", ">Share"), tuple(rows))
    bits = muted(
        f"{after} bits per weight, was {before}: everything stored, scales and kept layers included, over "
        f"{count(plan.parameters)} parameters."
    )
    return doc.Section("Size", (table, bits), anchor="size", lead=lead, forms=PAGE)


def noise_section(layers: Sequence[LayerError]) -> doc.Section | None:
    """Signal-to-noise of the layers; nothing where none has any noise."""
    if not any(math.isfinite(layer.snr_db) for layer in layers):
        return None
    lead = "How well stored weights reproduce the source, in dB; more is better."
    kinds = doc.Table(
        columns("Layers", "Scheme", ">Number", ">Lowest", ">Median"), tuple(_noise_rows(layers))
    )
    worst = sorted(layers, key=_noise_first)[:MAX_LAYERS]
    rows = (
        row(doc.TableCell(layer.name, mono=True), layer.scheme, decibels(layer.snr_db)) for layer in worst
    )
    table = doc.Table(columns("Layer", "Scheme", ">dB"), tuple(rows), stack=False)
    more = f"{count(len(layers) - len(worst))} more in report.json"
    content = parts(table, muted(more) if len(layers) > len(worst) else None)
    details = doc.Details(doc.TableCell("Layers from the lowest signal-to-noise up"), content)
    title = "Signal-to-noise by layer"
    return doc.Section(title, (kinds, details), anchor="signal-to-noise", lead=lead, forms=PAGE)


def _noise_rows(layers: Sequence[LayerError]) -> Iterator[tuple[doc.TableCell, ...]]:
    """A row for each kind of layer and scheme."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for layer in layers:
        kinds.setdefault((layer_kind(layer.name), layer.scheme), []).append(_noise_first(layer))
    for (kind, scheme), noise in kinds.items():
        yield row(
            doc.TableCell(kind, mono=True),
            scheme,
            count(len(noise)),
            decibels(min(noise)),
            decibels(median(noise)),
        )


def layer_kind(name: str) -> str:
    """Return a name without numbers: `model.layers.3.mlp.experts.7.up_proj` is `mlp.experts.up_proj`."""
    words = name.split(".")
    numbers = [index for index, word in enumerate(words) if word.isdecimal()]
    start = numbers[0] if numbers else 0
    return ".".join(word for word in words[start:] if not word.isdecimal())


def _noise_first(layer: LayerError) -> float:
    return -math.inf if math.isnan(layer.snr_db) else layer.snr_db


def sensitivity_sections(report: Report) -> tuple[doc.Part, ...]:
    """The losses of each group of layers, and the mixture that was chosen from them."""
    return parts(
        _sensitivity(report.sensitivity, report.mixed) if report.sensitivity else None,
        _mixed(report.mixed) if report.mixed else None,
    )


def _sensitivity(sensitivity: GroupSensitivities, mixed: MixedScheme | None) -> doc.Section:
    """Every group under every scheme, the most sensitive first, at most MAX_LAYERS."""
    lead = (
        "What each group of layers costs when it alone is quantized: KL against the source in nats per "
        f"token, on {count(sensitivity.tokens)} tokens of {count(sensitivity.samples)} samples."
    )
    chosen = {choice.name: choice.scheme for choice in mixed.choices} if mixed else {}
    groups = sorted(
        sensitivity.groups, key=lambda group: -max((each.loss for each in group.schemes), default=0.0)
    )
    rows = [
        row(
            doc.TableCell(group.name, mono=True),
            loss.scheme + (", chosen" if chosen.get(group.name) == loss.scheme else ""),
            size(loss.num_bytes),
            small(loss.loss),
        )
        for group in groups
        for loss in group.schemes
    ]
    header = columns("Group", "Scheme", ">Size", ">KL")
    content = (doc.Table(header, tuple(rows[:MAX_LAYERS]), stack=False),)
    return doc.Section("GroupSensitivities", content, anchor="sensitivity", lead=lead, forms=PAGE)


def _mixed(mixed: MixedScheme) -> doc.Section:
    lead = (
        f"Chosen from {', '.join(mixed.candidates)} within {budget_of(mixed)}: {size(mixed.output_bytes)}, a "
        f"predicted loss of {small(mixed.loss)} nats per token."
    )
    return doc.Section("Mixed scheme", (), lead=lead, forms=PAGE)


_WARNS = "An early signal: it warns, it never decides."
_FIRST = "The first tokens of each row of the text that decides."


def signals_section(report: Report) -> doc.Section | None:
    """The drift of both models' log-probabilities; None where they were not compared."""
    drift, attribution = report.drift, report.attribution
    if not drift and not attribution:
        return None
    by_tasks = report.verdict is None or report.verdict.text is None
    lead = (
        f"Both models in vLLM on the same {count(drift.positions)} tokens of {count(drift.prompts)} prompts. "
        f"{_WARNS if by_tasks else _FIRST}"
        if drift
        else ""
    )
    worst = [_prompt(prompt, drift.kl_limit) for prompt in drift.worst] if drift else []
    content = parts(
        _drift(drift, by_tasks=by_tasks) if drift else None,
        _cause(attribution) if attribution else None,
        doc.Section("Prompts that changed most", tuple(worst)) if worst else None,
    )
    return doc.Section("Log-probabilities", content, anchor="log-probabilities", lead=lead, forms=PAGE)


def _drift(drift: Drift, *, by_tasks: bool) -> tuple[doc.Part, ...]:
    """The means against their limits, which the text that decides has in its own table."""
    rise, kl = drift.candidate_nll - drift.baseline_nll, drift.mean_kl
    within = [badge("WARNING" if over else "PASS") for over in (kl > drift.kl_limit, rise > drift.nll_limit)]
    rows = (
        row("Mean KL, nats per token", small(kl), small(drift.kl_limit), within[0]),
        row("NLL, quantized minus baseline", f"{rise:+.3g}", f"{drift.nll_limit:+.3g}", within[1]),
    )
    more = (
        f"Largest KL of one token {small(drift.max_kl)}; the likeliest token is the same at "
        f"{percent(drift.top1_agreement)} of the positions; NLL {small(drift.baseline_nll)} and "
        f"{small(drift.candidate_nll)}."
    )
    table = doc.Table(columns("Measure", ">Value", ">Limit", "Within"), rows)
    return (table, muted(more)) if by_tasks else (muted(more),)


def _cause(attribution: Attribution) -> doc.Section:
    distances = {
        "Noise floor": attribution.noise,
        "Quantization": attribution.quantization,
        "Engine": attribution.engine,
        "All together": attribution.total,
    }
    rows = tuple(
        row(
            label,
            f"{distance.measured} against {distance.reference}",
            doc.TableCell(small(distance.mean_kl), f"at most {small(distance.max_kl)}"),
            small(distance.limit),
        )
        for label, distance in distances.items()
        if distance
    )
    table = doc.Table(columns("Part", "Measured", ">Mean KL", ">Limit"), rows)
    evidence = map(muted, (*attribution.harness, *attribution.evidence))
    return doc.Section(
        "Where the loss comes from", parts(doc.Paragraph(attribution_line(attribution)), table, evidence)
    )


def _prompt(prompt: PromptDrift, limit: float) -> doc.Details:
    def remark(kl: float, before: float, after: float) -> str:
        return f"KL {small(kl)}, NLL {small(before)} to {small(after)}"

    tokens = doc.Tokens(
        tuple(
            (token.token, heat(token.kl, limit), remark(token.kl, token.baseline_nll, token.candidate_nll))
            for token in prompt.tokens
        )
    )
    summary = remark(prompt.kl, prompt.baseline_nll, prompt.candidate_nll)
    return doc.Details(doc.TableCell(summary, prompt.prompt, mono=True), (tokens,))


def heat(kl: float, limit: float) -> int:
    """Return how dark a token is drawn: 0 up to the limit, a step for each power of ten above it, at most 3.

    What is not a number is drawn as dark as can be: the model gave no probability there.
    """
    if not math.isfinite(kl):
        return 3
    return min(3, math.ceil(math.log10(kl / limit))) if kl > limit > 0 else 0


def budget_of(mixed: MixedScheme) -> str:
    """Return the budget of the mixed scheme in words."""
    limits = {
        "bits": f"{mixed.limit:g} bits per weight",
        "bytes": size(round(mixed.limit)),
        "share": f"{percent(mixed.limit, 0)} of the source's bytes",
    }
    return limits[mixed.budget]


def mixed_line(mixed: MixedScheme) -> str:
    """The budget, what it came to, and the loss that it predicts."""
    counts = Counter(choice.scheme for choice in mixed.choices)
    chosen = ", ".join(f"{scheme} for {plural(number, 'group')}" for scheme, number in counts.items())
    return f"within {budget_of(mixed)}: {chosen}; predicted loss {small(mixed.loss)} nats per token"


def rounding_lines(rounding: RoundingReport | None) -> tuple[str, ...]:
    """Return how many groups were rounded in which way, how strongly, and what it gained."""
    if rounding is None:
        return ()
    kinds = Counter(group.rounding for group in rounding.groups)
    done = [group for group in rounding.groups if group.rounding != "nearest"]
    return tuple(
        filter(
            None,
            (
                ", ".join(f"{kind} of {plural(number, 'group')}" for kind, number in kinds.items()),
                _strength_line(done),
                _gain_line(done),
            ),
        )
    )


def _gain_line(groups: Sequence[GroupRounding]) -> str:
    """Return the error of the groups' outputs, and that of the nearest numbers."""
    if not groups:
        return ""
    before, after = (median(group.nearest_error for group in groups), median(group.error for group in groups))
    return f"output error {percent(after, 2)} of the signal, {percent(before, 2)} to nearest (median)"


def _strength_line(groups: Sequence[GroupRounding]) -> str:
    """Return the strengths and ridges of the refit: the most frequent of each strength."""
    kinds = Counter((group.strength, group.damping, group.weighs_tokens) for group in groups)
    most = dict[float, str]()
    for (strength, ridge, weighed), _ in kinds.most_common():
        if strength:
            weights = ", tokens weighed" if weighed else ""
            most.setdefault(strength, f"{strength:g} of the refit, ridge {ridge:g}{weights}")
    return "; ".join(most.values())


def fallback_lines(rounding: RoundingReport | None) -> tuple[str, ...]:
    """Return the groups rounded to nearest although a rule asks for more, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for group in rounding.fallbacks if rounding else ():
        reasons.setdefault(group.fallback or "", []).append(group.name)
    return tuple(f"{_named(names)} rounded to nearest: {reason}" for reason, names in reasons.items())


def _named(names: list[str]) -> str:
    more = f" and {count(len(names) - MAX_NAMED)} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def fallback_findings(rounding: RoundingReport | None) -> Iterator[Finding]:
    """A warning for each group that was rounded to nearest although a rule asks for more."""
    for group in rounding.fallbacks if rounding else ():
        yield Finding(
            check="rounding",
            severity="warning",
            where=group.name,
            expected="weights rounded by what calibration text shows of their inputs",
            got=f"weights rounded to nearest: {group.fallback}",
            fix="calibrate with more rows, or give these layers a rule with rounding: nearest",
        )


def rounding_section(rounding: RoundingReport | None) -> doc.Section | None:
    """Every group with its output error before and after, and the hidden states' error of each layer."""
    if rounding is None:
        return None
    worst = sorted(rounding.groups, key=lambda group: -group.error)
    rows = tuple(map(_group_row, worst[:MAX_LAYERS]))
    titles = columns("Group", "Rounding", ">Nearest", ">Written", ">Strength", ">Ridge", ">Tokens/column")
    more = f"{count(len(worst) - MAX_LAYERS)} more in rounding.json"
    table = parts(doc.Table(titles, rows, stack=False), muted(more) if len(worst) > MAX_LAYERS else None)
    states = (row(str(number), percent(layer.state_error)) for number, layer in enumerate(rounding.layers))
    layers = doc.Table(columns(">Layer", ">Error of hidden states"), tuple(states), stack=False)
    return doc.Section(
        "Rounding",
        (
            doc.Details(doc.TableCell("Groups from the largest output error down"), table),
            doc.Details(doc.TableCell("Decoder layers: squared error of the hidden states"), (layers,)),
        ),
        anchor="rounding",
        lead=". ".join((*rounding_lines(rounding), *fallback_lines(rounding))) + ".",
        forms=PAGE,
    )


def _group_row(group: GroupRounding) -> tuple[doc.TableCell, ...]:
    per_column = f"{group.tokens / group.columns:.1f}" if group.columns else ""
    errors = (percent(group.nearest_error), percent(group.error)) if group.tokens else ("", "")
    return row(
        doc.TableCell(group.name, mono=True),
        group.fallback or group.rounding,
        *errors,
        f"{group.strength:g}",
        f"{group.damping:g}",
        per_column,
    )
