"""The sections on a verdict: tasks, what decides nothing, how to read the numbers, flipped answers."""

from vexport.records import Comparison, Flip, TaskVerdict, TextLimit, TextVerdict, Verdict
from vexport.records.values import about
from vexport.reports import document as doc
from vexport.reports.charts import forests
from vexport.reports.document import PAGE, badge, columns, muted, parts, row
from vexport.reports.formatting import Scale, count, p_value, percent, percent_interval, plural, small
from vexport.reports.gates import verdict_gates
from vexport.reports.sentences import (
    accepted_loss,
    attribution_line,
    method_line,
    nats,
    nats_interval,
    scale_of,
    shown_comparisons,
    task_title,
)

MAX_FLIPS = 100
# The chart of a page has the result and the difference; the gates of a text have the result.
_TASK_COLUMNS = (
    doc.Column("Task"),
    doc.Column("Result", omit=("text", "html")),
    *columns(">Documents", ">Baseline", ">Quantized"),
    doc.Column("Difference", numeric=True, omit=("html",)),
    *columns(">Recovery", ">Lost / gained"),
)
_BESIDE_COLUMNS = (
    *columns("Also", ">Documents", ">Baseline", ">Quantized"),
    doc.Column("Difference", numeric=True, noted=True),
)


def verdict_document(verdict: Verdict) -> doc.Document:
    """A verdict that stands alone."""
    return doc.Document(
        title="accuracy",
        status=verdict.outcome,
        device=verdict.device,
        sentence=verdict.reason,
        gates=verdict_gates(verdict)[:-1],
        parts=(accuracy_section(verdict), *cause_parts(verdict)),
    )


def cause_parts(verdict: Verdict) -> tuple[doc.Part, ...]:
    """The cause of a loss, and how far apart the four log-probabilities are."""
    attribution = verdict.attribution
    if attribution is None:
        return ()
    distances = (
        ("noise", attribution.noise),
        ("quantization", attribution.quantization),
        ("engine", attribution.engine),
    )
    lines = ((name, f"{small(each.mean_kl)} nats a token") for name, each in distances if each is not None)
    return (doc.facts(("cause", attribution_line(attribution)), *lines),)


def accuracy_section(verdict: Verdict) -> doc.Section:
    """The tasks, what is shown next to their gates, and what weakens the answer."""
    if verdict.text is not None:
        return text_section(verdict, verdict.text)
    level = f"{100 * (1 - verdict.alpha):.4g}%"
    lead = (
        f"Quantized minus baseline on the same documents. The bar spans the {level} bounds that decide: a "
        "task passes when all of it lies right of the dashed line, fails when all of it lies left, and is "
        "inconclusive across it."
    )
    others = doc.Table(_BESIDE_COLUMNS, tuple(map(_comparison_row, shown_comparisons(verdict))))
    content = parts(
        forests(verdict),
        task_table(verdict) if verdict.tasks else None,
        doc.Section("For information, decides nothing", (others,)) if others.rows else None,
        [doc.Paragraph(warning, "warning") for warning in verdict.warnings],
        _reading(verdict),
    )
    return doc.Section("Accuracy", content, anchor="accuracy", lead=lead)


def task_table(verdict: Verdict) -> doc.Table:
    """A row for each task that has a gate, the method below it."""
    return doc.Table(_TASK_COLUMNS, tuple(map(_task_row, verdict.tasks)), caption=method_line(verdict))


def _task_row(task: TaskVerdict) -> tuple[doc.TableCell, ...]:
    scale, needed = scale_of(task), task.documents_needed
    flips = f"{count(task.right_to_wrong)} / {count(task.wrong_to_right)}"
    return row(
        doc.TableCell(
            task_title(task), f"{about(needed)} documents would settle it" if needed is not None else ""
        ),
        badge(task.outcome),
        count(task.documents),
        doc.TableCell(
            scale.value(task.baseline.value), scale.interval(task.baseline.low, task.baseline.high)
        ),
        doc.TableCell(
            scale.value(task.candidate.value), scale.interval(task.candidate.low, task.candidate.high)
        ),
        doc.TableCell(scale.change(task.difference), f"{scale.changes(task.low, task.high)} {scale.unit}"),
        doc.TableCell(percent(task.recovery), percent_interval(task.recovery_low, task.recovery_high)),
        doc.TableCell(flips, f"flips {percent(task.flip_rate, 2)}"),
    )


def _comparison_row(comparison: Comparison) -> tuple[doc.TableCell, ...]:
    scale = Scale(max(comparison.baseline, comparison.candidate) <= 1)
    interval = f"{scale.changes(comparison.low, comparison.high)} {scale.unit}"
    return row(
        task_title(comparison),
        count(comparison.documents),
        scale.value(comparison.baseline),
        scale.value(comparison.candidate),
        doc.TableCell(scale.change(comparison.difference), interval),
    )


def _reading(verdict: Verdict) -> doc.Details:
    """An explanation of the numbers, folded; with p values, where documents were paired."""
    flips = tuple(
        row(
            task_title(task),
            doc.TableCell(percent(task.flip_rate, 2), percent_interval(task.flip_low, task.flip_high)),
            count(task.changed_wrong),
            p_value(task.mcnemar_p),
        )
        for task in verdict.tasks
    )
    table = doc.Table(columns("Task", ">Flips", ">Still wrong, other answer", ">p"), flips)
    lines = doc.Listing(row(*reading_lines(verdict)))
    p_values = ", ".join(f"{task.task} {p_value(task.mcnemar_p)}" for task in verdict.tasks)
    level, tasks = _level(verdict.alpha), len(verdict.tasks)
    corrected = f", the upper ones corrected for {tasks} tasks (Holm)" if tasks > 1 else ""
    brief = [f"intervals of differences: one-sided {level} bounds{corrected}"]
    brief += [f"p values, which decide nothing: {p_values}"] if p_values else []
    summary = doc.TableCell("How to read this, and p values")
    return doc.Details(summary, parts(lines, table if flips else None), brief=tuple(brief))


def accuracy_tiles(verdict: Verdict | None) -> tuple[doc.Tile, doc.Tile]:
    """The worst task, and the answers that flipped; or what the text says."""
    if verdict is not None and verdict.text is not None:
        return text_tiles(verdict.text)
    return _worst_tile(verdict), _flips_tile(verdict)


def _worst_tile(verdict: Verdict | None) -> doc.Tile:
    label = "Accuracy, worst task"
    if not verdict or not verdict.tasks:
        return doc.Tile(label, "not measured", "", "an earlier gate failed")
    worst = min(verdict.tasks, key=lambda task: task.low)
    scale = scale_of(worst)
    scores = f"{scale.value(worst.baseline.value)} to {scale.value(worst.candidate.value)}"
    note = f"{worst.task}: {scores}; a loss of {scale.limit(verdict.margin)} is accepted"
    return doc.Tile(label, scale.change(worst.difference), scale.unit, note)


def _flips_tile(verdict: Verdict | None) -> doc.Tile:
    label = "Answers that flipped"
    if not verdict or not verdict.tasks:
        return doc.Tile(label, "not measured", "", "an earlier gate failed")
    lost = sum(task.right_to_wrong for task in verdict.tasks)
    gained = sum(task.wrong_to_right for task in verdict.tasks)
    documents = f"of {count(sum(task.documents for task in verdict.tasks))}"
    return doc.Tile(label, count(lost + gained), documents, f"{count(lost)} lost, {count(gained)} gained")


def answers_section(verdict: Verdict | None) -> doc.Section | None:
    """The answers that flipped, task by task; nothing where none is recorded."""
    tasks = [task for task in verdict.tasks if task.flips] if verdict else []
    options = doc.Filter((("all", "all"), ("lost", "right to wrong"), ("gained", "wrong to right")))
    lead = "The same document, answered by both models."
    content = parts(options, map(_flips, tasks))
    return (
        doc.Section("Answers that flipped", content, anchor="answers", lead=lead, forms=PAGE)
        if tasks
        else None
    )


def _flips(task: TaskVerdict) -> doc.Details:
    """The losses first."""
    ordered = sorted(task.flips, key=lambda flip: flip.direction != "right to wrong")[:MAX_FLIPS]
    total = task.right_to_wrong + task.wrong_to_right
    rest = f"{count(len(ordered))} of {count(total)} shown; eval/*/samples_*.jsonl has all"
    counts = f"{count(task.right_to_wrong)} lost, {count(task.wrong_to_right)} gained"
    content = parts(map(_flip, ordered), muted(rest) if total > len(ordered) else None)
    return doc.Details(doc.TableCell(f"{task_title(task)}: {counts}"), content, open=True)


def _flip(flip: Flip) -> doc.Exchange:
    lost = flip.direction == "right to wrong"
    before, after = (("right", "pass"), ("wrong", "fail"))[:: 1 if lost else -1]
    answers = (
        ("target", flip.target, ""),
        (f"baseline, {before[0]}", flip.baseline, before[1]),
        (f"quantized, {after[0]}", flip.candidate, after[1]),
    )
    label = f"document {flip.doc_id}, {flip.direction}"
    return doc.Exchange(label, flip.prompt, answers, group="lost" if lost else "gained")


_COLUMNS = columns("Measure", "Result", ">Value", ">Limit")


def text_section(verdict: Verdict, text: TextVerdict) -> doc.Section:
    """The measures against their limits, and what else the log-probabilities tell."""
    return doc.Section(
        "Accuracy",
        parts(text_table(verdict, text), [doc.Paragraph(warning, "warning") for warning in verdict.warnings]),
        anchor="accuracy",
        lead="Both models read the same held-out text in vLLM; its log-probabilities decide, not tasks.",
    )


def text_table(verdict: Verdict, text: TextVerdict) -> doc.Table:
    """A row for each measure, what was read below it."""
    return doc.Table(_COLUMNS, tuple(map(_row, text.limits)), caption=_caption(verdict, text))


def _row(limit: TextLimit) -> tuple[doc.TableCell, ...]:
    needed = f"about {count(limit.rows_needed)} rows would settle it" if limit.rows_needed else ""
    value = doc.TableCell(nats(limit, limit.value), nats_interval(limit))
    bound = f"{limit.limit:.0%}" if limit.is_share else small(limit.limit)
    unit = limit.measure if limit.is_share else f"{limit.measure}, nats per token"
    return row(doc.TableCell(unit, needed), badge(limit.outcome), value, bound)


def _caption(verdict: Verdict, text: TextVerdict) -> str:
    is_partial = any("lower bound" in limit.measure for limit in text.limits)
    compared = "the tokens that both sides tell, others as one" if is_partial else "the whole vocabulary"
    drafts = text.acceptance
    accepted = (
        f"; acceptance length with {drafts.method} {drafts.baseline:.3f} and {drafts.candidate:.3f} "
        f"(drafts of {drafts.draft_tokens[0]:.2f} and {drafts.draft_tokens[1]:.2f} tokens)"
        if drafts
        else ""
    )
    return (
        f"{text.data} ({text.digest}): {plural(text.rows, 'row')}, {count(text.tokens)} tokens, the KL of "
        f"{count(text.positions)} of them over {compared}; NLL {small(text.baseline_nll)} and "
        f"{small(text.candidate_nll)}; the likeliest token is the same at {percent(text.top1_agreement)} "
        f"({percent_interval(text.top1_low, text.top1_high)}){accepted}; "
        f"alpha {verdict.alpha:g}; {verdict.method}"
    )


def text_tiles(text: TextVerdict) -> tuple[doc.Tile, doc.Tile]:
    """The KL, and the positions where the likeliest token is another."""
    kl, rise, *_ = text.limits
    note = f"a token, limit {kl.limit:g}; NLL {nats(rise, rise.value)}, limit {rise.limit:g}"
    other = percent(1 - text.top1_agreement)
    return (
        doc.Tile("KL on held-out text", small(kl.value), "nats", note),
        doc.Tile("Other likeliest token", other, "", f"of {count(text.tokens)} tokens"),
    )


def reading_lines(verdict: Verdict) -> tuple[str, ...]:
    """A sentence for each kind of number, the method last."""
    loss = accepted_loss(verdict)
    level = _level(verdict.alpha)
    lines = [
        f"Difference: quantized minus baseline on the same documents. A loss of {loss} is accepted.",
        f"Interval of a difference: from a {level} lower to a {level} upper bound, each one-sided. All of it "
        "above the accepted loss is PASS, all of it below is FAIL, else INCONCLUSIVE.",
        *_levels_line(verdict),
        f"Interval of a score, of recovery (quantized / baseline) and of flips: {_level(2 * verdict.alpha)}, "
        "two-sided.",
    ]
    if verdict.tasks:
        lines.append(
            "p (McNemar; a permutation test where answers are not right or wrong): whether the two models "
            "differ at all. It decides nothing: a small p next to PASS is a real loss that is smaller than "
            "what was accepted."
        )
    return (*lines, f"Method: {method_line(verdict)}.")


def _levels_line(verdict: Verdict) -> tuple[str, ...]:
    """Explain the level of one upper bound after Holm's correction (evaluation/verdict.py, holm_levels)."""
    tasks = len(verdict.tasks)
    if tasks < 2:
        return ()
    failed = sum(task.outcome == "FAIL" for task in verdict.tasks)
    levels = dict.fromkeys(_level(verdict.alpha / part) for part in (tasks, max(1, tasks - failed)))
    return (
        f"Several tasks: each of the {tasks} must pass, so lower bounds need no correction. One is enough to "
        f"fail, so upper bounds are corrected for {tasks} tasks (Holm): one alone stands at "
        f"{' to '.join(levels)}, all together at {_level(verdict.alpha)}.",
    )


def _level(alpha: float) -> str:
    """The confidence of a bound: 0.0125 is `98.75%`."""
    return f"{100 * (1 - alpha):.4g}%"
