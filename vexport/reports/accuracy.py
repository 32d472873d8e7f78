"""What a report has of a verdict: tasks, what decides nothing, how to read the numbers, flipped answers."""

from collections.abc import Sequence

from vexport.evaluation.reason import about
from vexport.reports.charts.forest import forests
from vexport.reports.charts.plane import looks_charts
from vexport.reports.document import (
    Cell,
    Column,
    Details,
    Document,
    Exchange,
    Filter,
    Listing,
    Paragraph,
    Part,
    Section,
    Side,
    Table,
    Tile,
    badge,
    columns,
)
from vexport.reports.formatting import count, p_value, percent, percent_interval
from vexport.reports.gates import verdict_gates
from vexport.reports.reading import levels_line, p_values_line, reading_lines
from vexport.reports.sentences import (
    method_line,
    scale_of,
    scale_of_comparison,
    shown_comparisons,
    task_title,
)
from vexport.types import Comparison, Flip, TaskVerdict, Verdict

MAX_FLIPS = 100
# The chart of a page has the result and the difference; the gates of a text have the result.
_TASK_COLUMNS = (
    Column("Task"),
    Column("Result", omit=("text", "html")),
    *columns("Documents", "Baseline", "Quantized", numeric=True),
    Column("Difference", numeric=True, omit=("html",)),
    *columns("Recovery", "Lost / gained", numeric=True),
)
_BESIDE_COLUMNS = (
    Column("Also"),
    *columns("Documents", "Baseline", "Quantized", numeric=True),
    Column("Difference", numeric=True, noted=True),
)


def verdict_document(verdict: Verdict) -> Document:
    """A verdict that stands alone."""
    return Document(
        title="accuracy",
        status=verdict.outcome,
        device=verdict.device,
        sentence=verdict.reason,
        gates=verdict_gates(verdict)[:-1],
        parts=(accuracy_section(verdict),),
    )


def accuracy_section(verdict: Verdict) -> Section:
    """The tasks, what is shown next to their gates, and what weakens the answer."""
    level = f"{100 * (1 - verdict.alpha):.4g}%"
    return Section(
        title="Accuracy",
        anchor="accuracy",
        lead=f"Quantized minus baseline on the same documents. The bar spans the {level} bounds that decide: "
        "a task passes when all of it lies right of the dashed line, fails when all of it lies left, and is "
        "inconclusive across it.",
        parts=(
            *forests(verdict),
            *((task_table(verdict),) if verdict.tasks else ()),
            *_beside(shown_comparisons(verdict)),
            *looks_charts(verdict),
            *(Paragraph(warning, "warning") for warning in verdict.warnings),
            _reading(verdict),
        ),
    )


def task_table(verdict: Verdict) -> Table:
    """A row for each task that has a gate, the method below it."""
    rows = tuple(map(_task_row, verdict.tasks))
    return Table(columns=_TASK_COLUMNS, rows=rows, caption=method_line(verdict))


def _task_row(task: TaskVerdict) -> tuple[Cell, ...]:
    scale = scale_of(task)
    needed = task.documents_needed
    return (
        Cell(
            task_title(task), note=f"{about(needed)} documents would settle it" if needed is not None else ""
        ),
        badge(task.outcome),
        Cell(count(task.documents)),
        *(
            Cell(scale.value(score.value), scale.interval(score.low, score.high))
            for score in (task.baseline, task.candidate)
        ),
        Cell(scale.change(task.difference), f"{scale.changes(task.low, task.high)} {scale.unit}"),
        Cell(percent(task.recovery), percent_interval(task.recovery_low, task.recovery_high)),
        Cell(
            f"{count(task.right_to_wrong)} / {count(task.wrong_to_right)}",
            f"flips {percent(task.flip_rate, 2)}",
        ),
    )


def _beside(comparisons: Sequence[Comparison]) -> tuple[Part, ...]:
    if not comparisons:
        return ()
    table = Table(columns=_BESIDE_COLUMNS, rows=tuple(map(_comparison_row, comparisons)))
    return (Section(title="For information, decides nothing", parts=(table,)),)


def _comparison_row(comparison: Comparison) -> tuple[Cell, ...]:
    scale = scale_of_comparison(comparison)
    low, high = comparison.low, comparison.high
    return (
        Cell(task_title(comparison)),
        Cell(count(comparison.documents)),
        Cell(scale.value(comparison.baseline)),
        Cell(scale.value(comparison.candidate)),
        Cell(scale.change(comparison.difference), f"{scale.changes(low, high)} {scale.unit}"),
    )


def _reading(verdict: Verdict) -> Details:
    """What the numbers are, folded; with p values, where documents were paired."""
    paired = [task for task in verdict.tasks if task.flip_rate is not None]
    rows = tuple(
        (
            Cell(task_title(task)),
            Cell(percent(task.flip_rate, 2), percent_interval(task.flip_low, task.flip_high)),
            Cell(count(task.changed_wrong)),
            Cell(p_value(task.mcnemar_p)),
        )
        for task in paired
    )
    header = (Column("Task"), *columns("Flips", "Still wrong, other answer", "p", numeric=True))
    p_values = p_values_line(verdict)
    return Details(
        summary=Cell("How to read this, and p values"),
        parts=(
            Listing(tuple(map(Cell, reading_lines(verdict)))),
            *((Table(columns=header, rows=rows),) if rows else ()),
        ),
        brief=(
            levels_line(verdict),
            *((f"p values, which decide nothing: {p_values}",) if p_values else ()),
        ),
    )


def accuracy_tiles(verdict: Verdict | None) -> tuple[Tile, Tile]:
    """The worst task, and the answers that flipped."""
    return _worst_tile(verdict), _flips_tile(verdict)


def _worst_tile(verdict: Verdict | None) -> Tile:
    label = "Accuracy, worst task"
    if not verdict or not verdict.tasks:
        return Tile(label=label, figure="not measured", note="an earlier gate failed")
    worst = min(verdict.tasks, key=lambda task: task.low)
    scale = scale_of(worst)
    return Tile(
        label=label,
        figure=scale.change(worst.difference),
        unit=scale.unit,
        note=f"{worst.task}: {scale.value(worst.baseline.value)} to {scale.value(worst.candidate.value)}; "
        f"a loss of {scale.limit(verdict.margin)} is accepted",
    )


def _flips_tile(verdict: Verdict | None) -> Tile:
    label = "Answers that flipped"
    paired = [task for task in verdict.tasks if task.flip_rate is not None] if verdict else []
    if not paired:
        reason = "no samples to pair" if verdict else "an earlier gate failed"
        return Tile(label=label, figure="not measured", note=reason)
    lost = sum(task.right_to_wrong or 0 for task in paired)
    gained = sum(task.wrong_to_right or 0 for task in paired)
    return Tile(
        label=label,
        figure=count(lost + gained),
        unit=f"of {count(sum(task.documents for task in paired))}",
        note=f"{count(lost)} lost, {count(gained)} gained",
    )


def answers_section(verdict: Verdict | None) -> tuple[Section, ...]:
    """The answers that flipped, task by task; nothing where none is recorded."""
    tasks = [task for task in verdict.tasks if task.flips] if verdict else []
    if not tasks:
        return ()
    options = (("all", "all"), ("lost", "right to wrong"), ("gained", "wrong to right"))
    return (
        Section(
            title="Answers that flipped",
            anchor="answers",
            lead="The same document, answered by both models.",
            parts=(Filter(options), *map(_flips, tasks)),
            forms=("html",),
        ),
    )


def _flips(task: TaskVerdict) -> Details:
    """The losses first."""
    ordered = sorted(task.flips, key=lambda flip: flip.direction != "right to wrong")[:MAX_FLIPS]
    total = (task.right_to_wrong or 0) + (task.wrong_to_right or 0)
    rest = f"{count(len(ordered))} of {count(total)} shown; eval/*/samples_*.jsonl has all"
    counts = f"{count(task.right_to_wrong)} lost, {count(task.wrong_to_right)} gained"
    return Details(
        summary=Cell(f"{task_title(task)}: {counts}"),
        parts=(*map(_flip, ordered), *((Paragraph(rest, "muted"),) if total > len(ordered) else ())),
        open=True,
    )


def _flip(flip: Flip) -> Exchange:
    lost = flip.direction == "right to wrong"
    before, after = ("right", "wrong") if lost else ("wrong", "right")
    tones = {"right": "pass", "wrong": "fail"}
    return Exchange(
        label=f"document {flip.doc_id}, {flip.direction}",
        prompt=flip.prompt,
        sides=(
            Side(label="target", text=flip.target),
            Side(label=f"baseline, {before}", text=flip.baseline, tone=tones[before]),
            Side(label=f"quantized, {after}", text=flip.candidate, tone=tones[after]),
        ),
        group="lost" if lost else "gained",
    )
