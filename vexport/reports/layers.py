"""What a page has on weights and layers: sizes, signal-to-noise, sensitivity, drift between the models."""

import math
from collections.abc import Sequence

from vexport.reports.charts.bars import chosen_schemes, loss_bars, plan_bars, size_bars
from vexport.reports.charts.layers import layer_chart
from vexport.reports.charts.plane import tradeoff_chart
from vexport.reports.document import (
    Cell,
    Column,
    Details,
    Paragraph,
    Part,
    Section,
    Table,
    Tokens,
    badge,
    cells,
    columns,
)
from vexport.reports.formatting import count, decibels, percent, size, small
from vexport.reports.mixing import budget_of
from vexport.reports.sentences import attribution_line, schemes_in_use
from vexport.types import (
    Attempt,
    Attribution,
    Drift,
    LayerError,
    MixedScheme,
    PromptDrift,
    Report,
    Sensitivity,
)

MAX_LAYERS = 400


def size_section(report: Report) -> Section:
    """What is stored, before and after, and by kind of layer."""
    plan = report.plan
    layers = sum(len(group.members) for group in plan.groups)
    kept = f": {', '.join(plan.kept_linears)}" if plan.kept_linears else ""
    kinds = Section(title="By kind of layer", parts=(size_bars(report.sizes),))
    bits = f"everything stored, scales and kept layers included, over {count(plan.parameters)} parameters"
    return Section(
        title="Size",
        anchor="size",
        lead=f"{count(layers)} linear layers quantized in {count(len(plan.groups))} fusion groups "
        f"({schemes_in_use(plan)}); {count(len(plan.kept_linears))} kept{kept}.",
        parts=(
            plan_bars(plan),
            *((kinds,) if report.sizes else ()),
            Paragraph(f"Bits per weight: {bits}.", "muted"),
        ),
        forms=("html",),
    )


def noise_section(layers: Sequence[LayerError]) -> tuple[Section, ...]:
    """Signal-to-noise of the layers; nothing where none has any noise."""
    chart = layer_chart(layers)
    if chart is None:
        return ()
    hidden = f"; {count(chart.hidden)} dots between their neighbours are left out" if chart.hidden else ""
    worst = sorted(layers, key=_noise_first)[:MAX_LAYERS]
    more = f"{count(len(layers) - len(worst))} more in report.json"
    table = Table(
        columns=(*columns("Layer", "Scheme"), Column("dB", numeric=True)),
        rows=tuple(
            (Cell(layer.name, mono=True), Cell(layer.scheme), Cell(decibels(layer.snr_db))) for layer in worst
        ),
        stack=False,
    )
    details = Details(
        summary=Cell("Layers from the lowest signal-to-noise up"),
        parts=(table, *((Paragraph(more, "muted"),) if len(layers) > len(worst) else ())),
    )
    return (
        Section(
            title="Signal-to-noise by layer",
            anchor="signal-to-noise",
            lead="How well the stored weights reproduce the source, in dB; more is better. A dot is one "
            f"layer{hidden}.",
            parts=(chart, details),
            forms=("html",),
        ),
    )


def _noise_first(layer: LayerError) -> float:
    return -math.inf if math.isnan(layer.snr_db) else layer.snr_db


def sensitivity_sections(report: Report) -> tuple[Section, ...]:
    """What each group of layers loses, the mixture that was chosen from that, the rounds until it passed."""
    sensitivity, mixed = report.sensitivity, report.mixed
    return (
        *((_sensitivity(sensitivity, mixed),) if sensitivity else ()),
        *((_mixed(mixed),) if mixed else ()),
        *((_attempts(report.attempts),) if report.attempts else ()),
    )


def _sensitivity(sensitivity: Sensitivity, mixed: MixedScheme | None) -> Section:
    rank = sensitivity.rank_correlation
    correlation = (
        f"; estimates and measured losses have a rank correlation of {rank:.2f}" if rank is not None else ""
    )
    method = "measured" if sensitivity.method == "measure" else "estimated"
    return Section(
        title="Sensitivity",
        anchor="sensitivity",
        lead="What each group of layers costs when it alone is quantized: KL against the source in nats per "
        f"token, {method} on {count(sensitivity.tokens)} tokens of {count(sensitivity.samples)} "
        f"samples{correlation}.",
        parts=(
            loss_bars(sensitivity, mixed),
            Details(summary=Cell("All groups and schemes"), parts=(_losses(sensitivity, mixed),)),
        ),
        forms=("html",),
    )


def _losses(sensitivity: Sensitivity, mixed: MixedScheme | None) -> Table:
    """Every group under every scheme, in the model's order, at most MAX_LAYERS."""
    chosen = chosen_schemes(mixed)
    rows = [
        (
            Cell(group.name, mono=True),
            Cell(loss.scheme + (", chosen" if chosen.get(group.name) == loss.scheme else "")),
            Cell(size(loss.num_bytes)),
            Cell("" if loss.measured is None else small(loss.measured)),
            Cell(small(loss.estimate)),
        )
        for group in sensitivity.groups
        for loss in group.schemes
    ]
    header = (*columns("Group", "Scheme"), *columns("Size", "Measured", "Estimate", numeric=True))
    return Table(columns=header, rows=tuple(rows[:MAX_LAYERS]), stack=False)


def _mixed(mixed: MixedScheme) -> Section:
    chart = tradeoff_chart(mixed)
    return Section(
        title="Mixed scheme",
        lead=f"Chosen from {', '.join(mixed.candidates)} within {budget_of(mixed)}: "
        f"{size(mixed.output_bytes)}, a predicted loss of {small(mixed.loss)} nats per token.",
        parts=(chart,) if chart else (),
        forms=("html",),
    )


def _attempts(attempts: Sequence[Attempt]) -> Section:
    header = (*columns("Round", "Result", "Promoted"), *columns("Size", "Predicted loss", numeric=True))
    rows = tuple(
        (
            Cell(str(attempt.number)),
            Cell(attempt.outcome, attempt.reason, tone=attempt.outcome.lower(), badge=True),
            Cell(
                "\n".join(
                    f"{group.name} {group.before} to {group.after} (+{size(group.num_bytes)})"
                    for group in attempt.promotions
                )
                or "nothing"
            ),
            Cell(size(attempt.output_bytes)),
            Cell(small(attempt.loss)),
        )
        for attempt in attempts
    )
    return Section(
        title="Until it passed",
        lead="After every failure the groups that cost most were given more bits.",
        parts=(Table(columns=header, rows=rows),),
        forms=("html",),
    )


def signals_section(report: Report) -> tuple[Section, ...]:
    """What the log-probabilities of both models show; nothing where they were not compared."""
    drift, attribution = report.drift, report.attribution
    if not drift and not attribution:
        return ()
    lead = (
        f"Both models in vLLM on the same {count(drift.positions)} tokens of {count(drift.prompts)} prompts. "
        "An early signal: it warns, it never decides."
        if drift
        else ""
    )
    return (
        Section(
            title="Log-probabilities",
            anchor="log-probabilities",
            lead=lead,
            parts=(
                *(_drift(drift) if drift else ()),
                *((_cause(attribution),) if attribution else ()),
                *((_worst_prompts(drift),) if drift and drift.worst else ()),
            ),
            forms=("html",),
        ),
    )


def _drift(drift: Drift) -> tuple[Part, ...]:
    rise = drift.candidate_nll - drift.baseline_nll
    measures = (
        (
            "Mean KL, nats per token",
            small(drift.mean_kl),
            small(drift.kl_limit),
            drift.mean_kl > drift.kl_limit,
        ),
        ("NLL, quantized minus baseline", f"{rise:+.3g}", f"{drift.nll_limit:+.3g}", rise > drift.nll_limit),
    )
    header = (Column("Measure"), *columns("Value", "Limit", numeric=True), Column("Within"))
    rows = tuple(
        (*cells(label, value, limit), badge("WARNING" if beyond else "PASS"))
        for label, value, limit, beyond in measures
    )
    more = (
        f"Largest KL of one token {small(drift.max_kl)}; the likeliest token is the same at "
        f"{percent(drift.top1_agreement)} of the positions; NLL {small(drift.baseline_nll)} and "
        f"{small(drift.candidate_nll)}."
    )
    return Table(columns=header, rows=rows), Paragraph(more, "muted")


def _cause(attribution: Attribution) -> Section:
    distances = (
        ("Noise floor", attribution.noise),
        ("Quantization", attribution.quantization),
        ("Engine", attribution.engine),
        ("All together", attribution.total),
    )
    rows = tuple(
        (
            Cell(label),
            Cell(f"{distance.measured} against {distance.reference}"),
            Cell(small(distance.mean_kl), f"at most {small(distance.max_kl)}"),
            Cell(small(distance.limit)),
        )
        for label, distance in distances
        if distance
    )
    header = (*columns("Part", "Measured"), *columns("Mean KL", "Limit", numeric=True))
    return Section(
        title="Where the loss comes from",
        parts=(
            Paragraph(attribution_line(attribution)),
            Table(columns=header, rows=rows),
            *(Paragraph(line, "muted") for line in (*attribution.harness, *attribution.evidence)),
        ),
    )


def _worst_prompts(drift: Drift) -> Section:
    return Section(
        title="Prompts that changed most",
        parts=tuple(_prompt(prompt, drift.kl_limit) for prompt in drift.worst),
    )


def _prompt(prompt: PromptDrift, limit: float) -> Details:
    def remark(kl: float, before: float, after: float) -> str:
        return f"KL {small(kl)}, NLL {small(before)} to {small(after)}"

    tokens = tuple(
        (token.token, heat(token.kl, limit), remark(token.kl, token.baseline_nll, token.candidate_nll))
        for token in prompt.tokens
    )
    summary = remark(prompt.kl, prompt.baseline_nll, prompt.candidate_nll)
    return Details(summary=Cell(summary, prompt.prompt, mono=True), parts=(Tokens(tokens),))


def heat(kl: float, limit: float) -> int:
    """How dark a token is drawn: 0 up to the limit, a step for each power of ten above it, at most 3.

    What is not a number is drawn as dark as can be: the model gave no probability there.
    """
    if not math.isfinite(kl):
        return 3
    return min(3, math.ceil(math.log10(kl / limit))) if kl > limit > 0 else 0
