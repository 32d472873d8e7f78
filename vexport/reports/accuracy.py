"""Build the sections on a verdict: tasks, other comparisons, explanation and flipped answers."""

from collections.abc import Iterator
from dataclasses import replace

from vexport.records import (
    CandidateKind,
    Comparison,
    Estimate,
    Flip,
    TaskVerdict,
    TextLimit,
    TextVerdict,
    Verdict,
)
from vexport.records.scale import NOT_AVAILABLE, Scale, percent
from vexport.reports import document as doc
from vexport.reports.document import (
    TableCell,
    badge,
    judged_cell,
    muted,
    page_section,
    parts,
    row,
    table,
)
from vexport.reports.findings import verdict_gates
from vexport.reports.formatting import (
    attribution_line,
    count,
    direction_note,
    margin_text,
    method_line,
    next_step_of_verdict,
    percent_interval,
    shown_tasks,
    small,
    task_title,
    unsearched_cause,
)
from vexport.reports.positions import position_parts
from vexport.words import plural

MAX_FLIPS = 100
_MAX_INFORMATIONAL = 8
"""Maximum number of informational comparisons that are shown for each task. JSON has all."""


def verdict_document(verdict: Verdict) -> doc.Document:
    """Return the document of a verdict that is not part of a run."""
    return doc.Document(
        title="Accuracy",
        status=verdict.outcome,
        device=verdict.device,
        sentence=verdict.reason,
        warnings=verdict.warnings,
        next_step=next_step_of_verdict(verdict),
        gates=verdict_gates(replace(verdict, tasks=tuple(shown_tasks(verdict.tasks))))[:-1],
        parts=(accuracy_section(verdict), *cause_parts(verdict)),
    )


def cause_parts(verdict: Verdict) -> tuple[doc.Part, ...]:
    """Return the cause of a loss, and the mean KL of noise, quantization and engine."""
    attribution = verdict.attribution
    if attribution is None:
        unsearched = unsearched_cause(verdict)
        return (doc.facts(("cause", unsearched)),) if unsearched else ()
    distances = (
        ("noise", attribution.noise),
        ("quantization", attribution.quantization),
        ("engine", attribution.engine),
    )
    lines = (
        (name, f"{small(each.mean_kl)} nats per token")
        for name, each in distances
        if each is not None
    )
    return (doc.facts(("cause", attribution_line(attribution)), *lines),)


def accuracy_section(verdict: Verdict) -> doc.Section:
    """Return the section with the tasks and the informational comparisons.

    For held-out text, return the section with the text's measures and its positions.
    """
    if verdict.text is not None:
        lead = (
            "Both models read the same held-out text in vLLM. The log-probabilities decide, and "
            "there are no tasks."
        )
        content = parts(
            text_table(verdict, verdict.text),
            position_parts(verdict.text, verdict.candidate),
        )
        return doc.Section("Accuracy", content, "accuracy", lead)
    candidate = verdict.candidate.capitalize()
    lead = (
        f"{candidate} minus baseline on the same documents. The bar shows the interval between the "
        f"{_level(verdict.alpha)} bounds. A task passes if the whole bar is right of the dashed "
        "line, fails if the whole bar is left of it, and is inconclusive if the bar crosses the "
        "line."
    )
    difference = doc.Column("Difference", numeric=True, noted=True)
    titles = ("Metric", ">Documents", ">Baseline", f">{candidate}", difference)
    others = table(titles, map(_comparison_row, _shown_comparisons(verdict)))
    content = parts(
        forests(verdict),
        task_table(verdict) if verdict.tasks else None,
        _more_tasks(verdict),
        _lost_table(verdict),
        doc.Section("Informational metrics, not part of the verdict", (others,))
        if others.rows
        else None,
        _reading(verdict),
    )
    return doc.Section("Accuracy", content, "accuracy", lead)


def task_table(verdict: Verdict) -> doc.Table:
    """Return a table with a row for each task of the verdict, and with the method below it.

    The page leaves out result and difference, because its chart shows them. Plain text leaves out
    the result, because its gates show it.
    """
    result = doc.Column("Result", omit=("text", "html"))
    difference = doc.Column("Difference", numeric=True, omit=("html",))
    scores = (">Documents", ">Baseline", f">{verdict.candidate.capitalize()}")
    titles = ("Task", result, *scores, difference, ">Recovery", ">Lost / gained")
    return table(titles, map(_task_row, shown_tasks(verdict.tasks)), method_line(verdict))


def _more_tasks(verdict: Verdict) -> doc.Paragraph | None:
    total, shown = len(verdict.tasks), len(shown_tasks(verdict.tasks))
    if total == shown:
        return None
    return muted(f"the worst {count(shown)} of {count(total)} tasks; --format json has all")


def _lost_table(verdict: Verdict) -> doc.Section | None:
    rows = [
        row(
            task_title(task),
            model,
            count(side.answers),
            count(side.cut),
            count(side.empty),
            count(side.unparsed),
            percent(side.lost / side.answers),
        )
        for task in shown_tasks(verdict.tasks)
        if task.answers is not None
        for model, side in (
            ("baseline", task.answers.baseline),
            (verdict.candidate, task.answers.candidate),
        )
        if side is not None and side.cut + side.empty + side.unparsed
    ]
    if not rows:
        return None
    titles = ("Task", "Model", ">Generated", ">Cut", ">Empty", ">Nothing found", ">Do not count")
    caption = (
        "incorrect responses, by how they ended; nothing found: the task's filter found no answer; "
        "do not count: share of responses that say nothing about the model, for example because "
        "they were cut before the answer"
    )
    return doc.Section("Responses that were cut or are empty", (table(titles, rows, caption),))


def _task_row(task: TaskVerdict) -> Iterator[TableCell]:
    scale = task.scale
    yield TableCell(task_title(task), task.needed.remedy if task.needed else "")
    yield badge(task.outcome)
    yield TableCell(count(task.documents), f"{task.seeds} responses each" if task.seeds > 1 else "")
    for score in (task.baseline, task.candidate):
        yield TableCell(scale.value(score.value), scale.interval(score.low, score.high))
    yield TableCell(task.shown, f"{task.bounds} {scale.unit}")
    yield _share_cell(task.recovery)
    changes = task.changes
    flips = f"{count(changes.right_to_wrong)} / {count(changes.wrong_to_right)}"
    yield TableCell(flips, f"flips {percent(changes.flip_rate.value, 2)}")


def _share_cell(share: Estimate | None, digits: int = 1) -> TableCell:
    if share is None:
        return TableCell(NOT_AVAILABLE, NOT_AVAILABLE)
    return TableCell(percent(share.value, digits), percent_interval(share.low, share.high))


def _shown_comparisons(verdict: Verdict) -> Iterator[Comparison]:
    """Yield the comparison of all documents, then the informational comparisons of each task.

    At most _MAX_INFORMATIONAL comparisons are kept for each task: first its other metrics, then, if
    the task is a group, the members with the greatest loss. The original order is kept.
    """
    if verdict.pooled:
        yield verdict.pooled
    for task in shown_tasks(verdict.tasks):
        worst = sorted(task.also, key=lambda other: (other.task != task.task, other.difference))
        kept = set(map(id, worst[:_MAX_INFORMATIONAL]))
        yield from (comparison for comparison in task.also if id(comparison) in kept)


def _comparison_row(comparison: Comparison) -> doc.Row:
    scale, direction = comparison.scale, direction_note(comparison)
    title = task_title(comparison)
    return row(
        f"{title}: {direction}" if direction else title,
        count(comparison.documents),
        scale.value(comparison.baseline),
        scale.value(comparison.candidate),
        TableCell(comparison.shown, f"{comparison.bounds} {scale.unit}"),
    )


def forests(verdict: Verdict) -> Iterator[doc.Forest]:
    """Yield a chart for each combination of unit and margin, with the tasks that have both.

    The axis is slightly longer than the range of the values.
    """
    charts: dict[Scale, list[TaskVerdict]] = {}
    for task in shown_tasks(verdict.tasks):
        charts.setdefault(task.scale, []).append(task)
    for scale, tasks in charts.items():
        ends = [*(end for task in tasks for end in (task.low, task.high)), -scale.margin, 0.0]
        low, high = min(ends), max(ends)
        room = 0.06 * (high - low) or 1.0
        yield doc.Forest(
            scale=scale,
            tasks=tuple(tasks),
            low=low - room,
            high=high + room,
        )


def _reading(verdict: Verdict) -> doc.Details:
    flips = (
        (
            task_title(task),
            _share_cell(task.changes.flip_rate, 2),
            count(task.changes.changed_wrong),
        )
        for task in shown_tasks(verdict.tasks)
    )
    tests = table(("Task", ">Flips", ">Still wrong, other answer"), flips)
    corrected = f", the upper ones corrected for {len(verdict.tasks)} tasks (Holm)"
    bounds = f"intervals of differences: one-sided {_level(verdict.alpha)} bounds"
    brief = [bounds + (corrected if len(verdict.tasks) > 1 else "")]
    content = parts(doc.Listing(row(*_reading_lines(verdict))), tests if verdict.tasks else None)
    return doc.Details(TableCell("How to read this"), content, tuple(brief))


def _reading_lines(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence for each kind of number, and the method last.

    Holm's correction is described in judge/verdict.py, `holm_levels`.
    """
    level, tasks = _level(verdict.alpha), len(verdict.tasks)
    yield (
        f"Difference: {verdict.candidate} minus baseline on the same documents. The margin is "
        f"a loss of {margin_text(verdict)}."
    )
    yield (
        f"Interval of a difference: from a {level} lower to a {level} upper bound, each "
        "one-sided. A task passes if the whole interval is above minus the margin, fails if the "
        "whole interval is below it, and is inconclusive otherwise."
    )
    if tasks > 1:
        failed = sum(task.outcome == "FAIL" for task in verdict.tasks)
        levels = dict.fromkeys(
            _level(verdict.alpha / part) for part in (tasks, max(1, tasks - failed))
        )
        yield (
            f"Several tasks: each of the {tasks} must pass, so lower bounds need no correction. A "
            f"single failed task fails the verdict, so upper bounds are corrected for {tasks} "
            f"tasks (Holm). A single bound has a confidence of {' to '.join(levels)}, and all "
            f"bounds together have {level}."
        )
    yield (
        f"Interval of a score, of recovery ({verdict.candidate} / baseline) and of flips: "
        f"{_level(2 * verdict.alpha)}, "
        "two-sided."
    )
    yield f"Method: {method_line(verdict)}."


def _level(alpha: float) -> str:
    """Return the confidence of a bound: 0.0125 gives `98.75%`."""
    return f"{100 * (1 - alpha):.4g}%"


def accuracy_tiles(verdict: Verdict | None) -> tuple[doc.Tile, doc.Tile]:
    """Return tiles for the worst task and for the number of flipped answers.

    For held-out text, return tiles for the KL and for the likeliest tokens.
    """
    if verdict is not None and verdict.text is not None:
        kl, rise, *_ = verdict.text.limits
        place = f" in {kl.label}" if kl.label else ""
        note = f"per token{place}, limit {kl.limit:g}; NLL {rise.shown}, limit {rise.limit:g}"
        other, tokens = percent(1 - verdict.text.top1_agreement), count(verdict.text.tokens)
        return (
            doc.Tile("KL on held-out text", small(kl.value), "nats", note),
            doc.Tile("Likeliest token differs", other, "", f"of {tokens} tokens"),
        )
    first, second = "Accuracy, worst task", "Flipped between right and wrong"
    worst = verdict.worst_task if verdict else None
    if verdict is None or worst is None:
        nothing = ("not measured", "", "an earlier gate failed")
        return doc.Tile(first, *nothing), doc.Tile(second, *nothing)
    scale = worst.scale
    scores = f"{scale.value(worst.baseline.value)} to {scale.value(worst.candidate.value)}"
    note = f"{worst.task}: {scores}, interval {worst.bounds}; margin {scale.bare_limit}"
    lost = sum(task.changes.right_to_wrong for task in verdict.tasks)
    gained = sum(task.changes.wrong_to_right for task in verdict.tasks)
    asked = f"of {count(sum(task.documents * task.seeds for task in verdict.tasks))}"
    return (
        doc.Tile(first, worst.shown, scale.unit, note),
        doc.Tile(
            second, count(lost + gained), asked, f"{count(lost)} lost, {count(gained)} gained"
        ),
    )


def answers_section(verdict: Verdict | None) -> doc.Section | None:
    """Return the flipped answers by task, or None if none are recorded."""
    if verdict is None:
        return None
    tasks = [task for task in shown_tasks(verdict.tasks) if task.changes.flips]
    if not tasks:
        return None
    lead = "Responses of both models to the same document."
    filters = (("all", "all"), ("lost", "right to wrong"), ("gained", "wrong to right"))
    section = page_section(
        "Responses that flipped between right and wrong",
        "answers",
        lead,
        [_flips(task, verdict.candidate) for task in tasks],
    )
    return replace(section, filters=filters)


def _flips(task: TaskVerdict, candidate: CandidateKind) -> doc.Details:
    changes = task.changes
    ordered = sorted(changes.flips, key=lambda flip: flip.direction != "right to wrong")[:MAX_FLIPS]
    total = changes.right_to_wrong + changes.wrong_to_right
    shown = f"{count(len(ordered))} of {count(total)} shown"
    rest = f"{shown}; the samples_*.jsonl of both models have all"
    counts = f"{count(changes.right_to_wrong)} lost, {count(changes.wrong_to_right)} gained"
    content = parts(
        [_flip(flip, candidate) for flip in ordered], muted(rest) if total > len(ordered) else None
    )
    return doc.Details(TableCell(f"{task_title(task)}: {counts}"), content, open=True)


def _flip(flip: Flip, candidate: CandidateKind) -> doc.Exchange:
    before, _, after = flip.direction.split()
    tones = {"right": "pass", "wrong": "fail"}
    answers = (
        ("target", flip.target, ""),
        (f"baseline, {before}", flip.baseline, tones[before]),
        (f"{candidate}, {after}", flip.candidate, tones[after]),
    )
    group = "lost" if before == "right" else "gained"
    return doc.Exchange(f"document {flip.doc_id}, {flip.direction}", flip.prompt, answers, group)


def text_table(verdict: Verdict, text: TextVerdict) -> doc.Table:
    """Return a table with a row for each measure and its limit, and the text's data below it."""
    drafts, accepted = text.acceptance, ""
    if drafts:
        accepted = (
            f"; acceptance length with {drafts.method} {drafts.baseline:.3f} and "
            f"{drafts.candidate:.3f} "
            f"(drafts of {drafts.draft_tokens[0]:.2f} and {drafts.draft_tokens[1]:.2f} tokens)"
        )
    caption = (
        f"{text.data} ({text.digest}): {plural(text.rows, 'row')}, {count(text.tokens)} "
        f"tokens, the KL over {_compared_tokens(text)}; "
        f"NLL {small(text.baseline_nll)} and {small(text.candidate_nll)}; "
        f"the likeliest token is the same at "
        f"{percent(text.top1_agreement)} "
        f"({percent_interval(text.top1_low, text.top1_high)}){accepted}; "
        f"alpha {verdict.alpha:g}; {verdict.method}"
    )
    return table(("Measure", "Result", ">Value", ">Limit"), map(_limit_row, text.limits), caption)


def _compared_tokens(text: TextVerdict) -> str:
    """Return the part of the vocabulary over which the KL was computed, in words."""
    measures = {limit.measure for bucket in text.buckets for limit in bucket.limits}
    likeliest = (
        "the likeliest tokens of both models, with all other tokens counted as one token (a lower "
        "bound)"
    )
    if "lower bound of the KL to the baseline" not in measures:
        return "the whole vocabulary"
    if "KL to the baseline" not in measures:
        return likeliest
    return f"the whole vocabulary in {text.buckets[0].label} of each row, and then over {likeliest}"


def _limit_row(limit: TextLimit) -> doc.Row:
    needed = f"about {count(limit.rows_needed)} rows would settle it" if limit.rows_needed else ""
    needed = ", ".join(filter(None, (limit.label, needed)))
    unit = limit.measure if limit.is_share else f"{limit.measure}, nats per token"
    return row(TableCell(unit, needed), badge(limit.outcome), judged_cell(limit), limit.bound)
