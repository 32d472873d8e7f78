"""Build a page's sections on layers: sizes, rounding, signal-to-noise, sensitivity, and drift.

`rounding_lines`, `drift_line` and `mixed_line` also serve the summaries in text and Markdown.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from vexport.numerics.metrics import decibels
from vexport.quantize.warnings import fallback_warnings
from vexport.records import (
    Attribution,
    Drift,
    GroupSensitivities,
    KindSize,
    LayerError,
    MixedScheme,
    PromptDrift,
)
from vexport.records.calibration import GroupRounding, RoundingReport
from vexport.records.scale import percent
from vexport.reports import document as doc
from vexport.reports.document import TableCell, badge, mono, muted, page_section, parts, table
from vexport.reports.findings import folded_places
from vexport.reports.formatting import attribution_line, bits_per_weight, count, ratio, size, small
from vexport.reports.run_record import MadeCheckpoint, Report
from vexport.words import plural

MAX_LAYERS = 400
_DRIFT_NOTE = "This early signal can cause a warning, but it does not change the outcome."
_FIRST_TOKENS_NOTE = "The tokens are the first tokens of each row of the held-out text."


def checkpoint_sections(made: MadeCheckpoint) -> Iterator[doc.Section]:
    """Yield the sections on the layers of a checkpoint."""
    yield _size_section(made)
    sections = (_noise_section(made.layers), _rounding_section(made.rounding))
    yield from (section for section in sections if section is not None)
    yield from _sensitivity_sections(made)


def _size_section(made: MadeCheckpoint) -> doc.Section:
    plan = made.plan
    kept = f": {folded_places(plan.kept_linears)}" if plan.kept_linears else ""
    layers = count(sum(len(group.members) for group in plan.groups))
    lead = (
        f"{layers} linear layers quantized in {count(len(plan.groups))} fusion groups "
        f"({plan.scheme_names}); {count(len(plan.kept_linears))} kept{kept}."
    )
    before, after = (
        bits_per_weight(n, plan.parameters) for n in (plan.source_bytes, plan.output_bytes)
    )
    whole = KindSize(
        kind="checkpoint", source_bytes=plan.source_bytes, output_bytes=plan.output_bytes
    )
    rows = (
        (
            each.kind,
            size(each.source_bytes),
            size(each.output_bytes),
            ratio(each.output_bytes, each.source_bytes),
        )
        for each in (*made.sizes, whole)
    )
    bits = muted(
        f"{after} bits per weight, was {before}: everything stored, scales and kept layers "
        f"included, over "
        f"{count(plan.parameters)} parameters."
    )
    return page_section(
        "Size", "size", lead, table(("Kind", ">Source", ">Quantized", ">Share"), rows), bits
    )


def _noise_section(layers: Sequence[LayerError]) -> doc.Section | None:
    """Return the signal-to-noise ratios, first by kind of layer and scheme, then of each layer.

    Return None if the weights of all layers are stored without any error.
    """
    if not any(math.isfinite(layer.snr_db) for layer in layers):
        return None
    kinds: dict[tuple[str, str], list[float]] = {}
    for layer in layers:
        kinds.setdefault((layer_kind(layer.name), layer.scheme), []).append(_snr(layer))
    by_kind = (
        (mono(kind), scheme, count(len(snrs)), decibels(min(snrs)), decibels(median(snrs)))
        for (kind, scheme), snrs in kinds.items()
    )
    rows = [
        (mono(layer.name), layer.scheme, decibels(layer.snr_db))
        for layer in sorted(layers, key=_snr)
    ]
    details = _first_rows(("Layer", "Scheme", ">dB"), rows, "report.json")
    return page_section(
        "Signal-to-noise by layer",
        "signal-to-noise",
        "How well stored weights reproduce the source, in dB; more is better.",
        table(("Layers", "Scheme", ">Number", ">Lowest", ">Median"), by_kind),
        doc.Details(TableCell("Layers from the lowest signal-to-noise up"), details),
    )


def _first_rows(
    titles: Sequence[str], rows: Sequence[Sequence[TableCell | str]], file: str
) -> tuple[doc.Part, ...]:
    """Return a table of at most MAX_LAYERS rows, and the name of the file with the other rows."""
    more = len(rows) - MAX_LAYERS
    note = muted(f"{count(more)} more in {file}") if more > 0 else None
    return parts(table(titles, rows[:MAX_LAYERS], stack=False), note)


def layer_kind(name: str) -> str:
    """Return the part of a name after its first number, without further numbers.

    `model.layers.3.mlp.experts.7.up_proj` gives `mlp.experts.up_proj`. A name without a number is
    returned whole.
    """
    words = name.split(".")
    start = next((index for index, word in enumerate(words) if word.isdecimal()), 0)
    return ".".join(word for word in words[start:] if not word.isdecimal())


def _snr(layer: LayerError) -> float:
    """Return a layer's signal-to-noise ratio in dB. NaN becomes minus infinity, the worst value."""
    return -math.inf if math.isnan(layer.snr_db) else layer.snr_db


def _sensitivity_sections(made: MadeCheckpoint) -> Iterator[doc.Section]:
    if made.sensitivity:
        yield _sensitivity(made.sensitivity, made.mixed)
    if mixed := made.mixed:
        lead = (
            f"Chosen from {', '.join(mixed.candidates)} within {_budget(mixed)}: "
            f"{size(mixed.output_bytes)}, a predicted loss of {small(mixed.loss)} nats per token."
        )
        yield page_section("Mixed scheme", "", lead)


def _sensitivity(sensitivity: GroupSensitivities, mixed: MixedScheme | None) -> doc.Section:
    """Return every group under every scheme, the most sensitive group first."""
    lead = (
        "KL to the source if only this group of layers is quantized, in nats per token, on "
        f"{count(sensitivity.tokens)} tokens of {count(sensitivity.samples)} samples."
    )
    chosen = {choice.name: choice.scheme for choice in mixed.choices} if mixed else {}
    groups = sorted(
        sensitivity.groups,
        key=lambda group: -max((each.loss for each in group.schemes), default=0.0),
    )
    rows = [
        (
            mono(group.name),
            loss.scheme + (", chosen" if chosen.get(group.name) == loss.scheme else ""),
            size(loss.num_bytes),
            small(loss.loss),
        )
        for group in groups
        for loss in group.schemes
    ]
    losses = _first_rows(("Group", "Scheme", ">Size", ">KL"), rows, "report.json")
    return page_section("Sensitivity", "sensitivity", lead, losses)


def log_probabilities_section(report: Report) -> doc.Section | None:
    """Return the drift of both models' log-probabilities, and the cause of a loss.

    Return None if neither was measured.
    """
    drift, attribution, lead = report.drift, report.attribution, ""
    if not drift and not attribution:
        return None
    by_tasks = report.verdict is None or report.verdict.text is None
    if drift:
        lead = (
            f"Both models in vLLM on the same {count(drift.positions)} tokens of "
            f"{count(drift.prompts)} "
            f"prompts. {_DRIFT_NOTE if by_tasks else _FIRST_TOKENS_NOTE}"
        )
    worst = tuple(_prompt(prompt, drift.kl_limit) for prompt in drift.worst) if drift else ()
    return page_section(
        "Log-probabilities",
        "log-probabilities",
        lead,
        _drift(drift, by_tasks=by_tasks) if drift else None,
        _cause(attribution) if attribution else None,
        doc.Section("Prompts that changed most", worst) if worst else None,
    )


def _drift(drift: Drift, *, by_tasks: bool) -> tuple[doc.Part, ...]:
    """Return a table of the means with their limits, and a note with other numbers.

    For held-out text, only the note is returned, because the section on accuracy has the table.
    """
    rise, limit = f"{drift.nll_rise:+.3g}", f"{drift.nll_limit:+.3g}"
    rows = (
        (
            "Mean KL, nats per token",
            small(drift.mean_kl),
            small(drift.kl_limit),
            badge("WARNING" if drift.is_kl_high else "PASS"),
        ),
        (
            "NLL, quantized minus baseline",
            rise,
            limit,
            badge("WARNING" if drift.is_nll_high else "PASS"),
        ),
    )
    more = muted(
        f"Largest KL of a token {small(drift.max_kl)}; the likeliest token is the same at "
        f"{percent(drift.top1_agreement)} of the positions; NLL {small(drift.baseline_nll)} and "
        f"{small(drift.candidate_nll)}."
    )
    return parts(table(("Measure", ">Value", ">Limit", "Within"), rows) if by_tasks else None, more)


def drift_line(drift: Drift) -> str:
    """Return mean KL and NLL with their limits, and how often the likeliest token is the same."""
    return (
        f"mean KL {small(drift.mean_kl)} nats per token (limit {small(drift.kl_limit)}), NLL "
        f"{drift.nll_rise:+.3g} "
        f"(limit {drift.nll_limit:+.3g}), first choice agrees {percent(drift.top1_agreement)} over "
        f"{drift.positions} positions"
    )


def _cause(attribution: Attribution) -> doc.Section:
    distances = {
        "Noise floor": attribution.noise,
        "Quantization": attribution.quantization,
        "Engine": attribution.engine,
        "All together": attribution.total,
    }
    rows = (
        (
            label,
            f"{distance.measured} against {distance.reference}",
            TableCell(small(distance.mean_kl), f"at most {small(distance.max_kl)}"),
            small(distance.limit),
        )
        for label, distance in distances.items()
        if distance
    )
    content = parts(
        doc.Paragraph(attribution_line(attribution)),
        table(("Part", "Measured", ">Mean KL", ">Limit"), rows),
        map(muted, (*attribution.harness, *attribution.evidence)),
    )
    return doc.Section("Where the loss comes from", content)


def _prompt(prompt: PromptDrift, limit: float) -> doc.Details:
    def remark(kl: float, before: float, after: float) -> str:
        return f"KL {small(kl)}, NLL {small(before)} to {small(after)}"

    tokens = (
        (
            token.token,
            _heat(token.kl, limit),
            remark(token.kl, token.baseline_nll, token.candidate_nll),
        )
        for token in prompt.tokens
    )
    summary = remark(prompt.kl, prompt.baseline_nll, prompt.candidate_nll)
    return doc.Details(TableCell(summary, prompt.prompt, mono=True), (doc.Tokens(tuple(tokens)),))


def _heat(kl: float, limit: float) -> int:
    """Return the shade of a token, from 0 (KL within the limit) to 3.

    The shade is 1 up to 10 times the limit, and 2 up to 100 times. A KL that is not finite has the
    darkest shade, because the model gave no probability there.
    """
    if not math.isfinite(kl):
        return 3
    return min(3, math.ceil(math.log10(kl / limit))) if kl > limit > 0 else 0


def _budget(mixed: MixedScheme) -> str:
    if mixed.budget == "bits":
        return f"{mixed.limit:g} bits per weight"
    if mixed.budget == "bytes":
        return size(round(mixed.limit))
    return f"{percent(mixed.limit, 0)} of the source's bytes"


def mixed_line(mixed: MixedScheme) -> str:
    """Return the budget, the chosen schemes, and the predicted loss."""
    counts = Counter(choice.scheme for choice in mixed.choices)
    chosen = ", ".join(
        f"{scheme} for {plural(number, 'group')}" for scheme, number in counts.items()
    )
    return f"within {_budget(mixed)}: {chosen}; predicted loss {small(mixed.loss)} nats per token"


def rounding_lines(rounding: RoundingReport | None) -> Iterator[str]:
    """Yield lines on the methods of rounding, the settings of refits, and the output errors.

    The first line has the number of groups for each method. Each strength of a refit is listed with
    the ridge that most of its groups use. The errors are the medians after this rounding and after
    rounding to nearest.
    """
    if rounding is None:
        return
    kinds = Counter(group.rounding for group in rounding.groups)
    if kinds:
        yield ", ".join(f"{kind} of {plural(number, 'group')}" for kind, number in kinds.items())
    done = [group for group in rounding.groups if group.rounding != "nearest"]
    strengths = dict[float, str]()
    for (strength, ridge, is_weighted), _ in Counter(
        (group.strength, group.damping, group.weighs_tokens) for group in done if group.strength
    ).most_common():
        weights = ", tokens weighted by their gradients" if is_weighted else ""
        strengths.setdefault(
            strength, f"refit with strength {strength:g} and ridge {ridge:g}{weights}"
        )
    if strengths:
        yield "; ".join(strengths.values())
    if done:
        before, after = (
            median(group.nearest_error for group in done),
            median(group.error for group in done),
        )
        yield (
            f"median output error of a layer group {percent(after, 2)} "
            f"({percent(before, 2)} with nearest rounding)"
        )


def _rounding_section(rounding: RoundingReport | None) -> doc.Section | None:
    """Return the output error of each group, and the error of the hidden states after each layer.

    A group's error is given for rounding to nearest and for the written weights.
    """
    if rounding is None:
        return None
    worst = sorted(rounding.groups, key=lambda group: -group.error)
    titles = ("Group", "Rounding", ">Nearest", ">Written", ">Strength", ">Ridge", ">Tokens/column")
    groups = _first_rows(titles, [*map(_group_row, worst)], "rounding.json")
    states = (
        (str(number), percent(layer.state_error)) for number, layer in enumerate(rounding.layers)
    )
    layers = table((">Layer", ">Error of hidden states"), states, stack=False)
    return page_section(
        "Rounding",
        "rounding",
        ". ".join((*rounding_lines(rounding), *fallback_warnings(rounding))) + ".",
        doc.Details(TableCell("Groups from the largest output error down"), groups),
        doc.Details(TableCell("Decoder layers: squared error of the hidden states"), (layers,)),
    )


def _group_row(group: GroupRounding) -> tuple[TableCell | str, ...]:
    errors = (percent(group.nearest_error), percent(group.error)) if group.tokens else ("", "")
    strength = (f"{group.strength:g}", f"{group.damping:g}")
    per_column = f"{group.tokens / group.columns:.1f}" if group.columns else ""
    return (mono(group.name), group.fallback or group.rounding, *errors, *strength, per_column)
