"""One self-contained HTML page: no script, no network, light and dark, from 400 px up."""

import math
from collections.abc import Callable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vexport.evaluation.reason import about
from vexport.reports import formatting, sentences
from vexport.reports.charts.forest import forests
from vexport.reports.charts.layers import layer_chart
from vexport.reports.charts.losses import loss_bars, loss_rows
from vexport.reports.charts.plane import looks_charts, tradeoff_chart
from vexport.reports.charts.sizes import size_bars
from vexport.reports.coverage import coverage_lines
from vexport.reports.escaping import clip, visible
from vexport.reports.files import RunFile
from vexport.reports.gates import Gate, finding_counts, report_gates, staged_findings
from vexport.reports.matrix import matrix_tables
from vexport.reports.mixing import budget_of
from vexport.reports.reading import p_values_line, reading_lines
from vexport.types import Canary, Flip, LayerError, LoadReport, Report, TaskVerdict

# A prompt, and what the baseline and the quantized model wrote after it.
_CanaryPair = tuple[str, Canary | None, Canary | None]
MAX_FLIPS = 100
MAX_LAYERS = 400
MAX_FINDINGS = 200
MAX_TEXT = 2000
_FILTERS: Mapping[str, Callable[..., object]] = {
    "bits": formatting.bits_per_weight,
    "count": formatting.count,
    "decibels": formatting.decibels,
    "duration": formatting.duration,
    "p_value": formatting.p_value,
    "percent": formatting.percent,
    "size": formatting.size,
    "small": formatting.small,
}


def report(report: Report, files: Sequence[RunFile] = ()) -> str:
    """The page, with links to `files`; the same report gives the same bytes."""
    *gates, _ = report_gates(report)
    canaries = _paired_canaries(report.baseline_load, report.load)
    context = {
        "report": report,
        "contents": _contents(report, files),
        "files": files,
        "next_step": sentences.next_step(report),
        "sizes": size_bars(report.sizes),
        "device": sentences.report_device(report),
        "sentence": sentences.opening(sentences.report_sentence(report)),
        "gates": gates,
        "problems": [gate for gate in gates if gate.findings and _adds_to(report.reason, gate)],
        "findings": staged_findings(report)[:MAX_FINDINGS],
        "all_findings": len(staged_findings(report)),
        "counts": finding_counts([finding for _, finding in staged_findings(report)]),
        "forests": forests(report.verdict) if report.verdict else (),
        "looks": looks_charts(report.verdict) if report.verdict else (),
        "chart": layer_chart(report.layers),
        "layers": _worst_layers(report.layers),
        "sensitivity": report.sensitivity,
        "bars": loss_bars(report.sensitivity, report.mixed) if report.sensitivity else (),
        "losses": loss_rows(report.sensitivity, report.mixed, MAX_LAYERS) if report.sensitivity else (),
        "tradeoff": tradeoff_chart(report.mixed) if report.mixed else None,
        "canaries": [pair for pair in canaries if _has_text(pair)],
        "silent": sum(not _has_text(pair) for pair in canaries),
    }
    return render("report.html", context)


def _contents(report: Report, files: Sequence[RunFile]) -> Sequence[tuple[str, str]]:
    """The anchor and the title of every section that the page has, in order."""
    sections = (
        ("accuracy", "Accuracy", bool(report.verdict and report.verdict.tasks)),
        ("log-probabilities", "Log-probabilities", bool(report.drift or report.attribution)),
        ("size", "Size", True),
        ("signal-to-noise", "Signal-to-noise", layer_chart(report.layers) is not None),
        ("sensitivity", "Sensitivity", report.sensitivity is not None),
        ("load", "Load in vLLM", True),
        ("devices", "Other devices", report.dry_load is not None),
        ("findings", "Findings", True),
        ("answers", "Answers that flipped", _has_flips(report)),
        ("files", "Files", bool(files)),
        ("provenance", "Provenance", True),
    )
    return tuple((anchor, title) for anchor, title, shown in sections if shown)


def _has_flips(report: Report) -> bool:
    return report.verdict is not None and any(task.flips for task in report.verdict.tasks)


def render(template: str, context: Mapping[str, object]) -> str:
    """A page from a template of vexport/reports/templates; every value is escaped."""
    return _environment().get_template(template).render(context)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vexport.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(_FILTERS)
    environment.globals.update(
        about=about,
        attribution_line=sentences.attribution_line,
        budget_of=budget_of,
        clip=_clip,
        coverage_lines=coverage_lines,
        p_values_line=p_values_line,
        reading_lines=reading_lines,
        heat=_heat,
        matrix_tables=matrix_tables,
        percent_interval=formatting.percent_interval,
        accepted_loss=sentences.accepted_loss,
        prompting_line=sentences.prompting_line,
        scale_of=sentences.scale_of,
        scale_of_comparison=sentences.scale_of_comparison,
        shown_comparisons=sentences.shown_comparisons,
        ratio=formatting.ratio,
        schemes_in_use=sentences.schemes_in_use,
        served_with=sentences.served_with,
        shown_flips=_shown_flips,
        task_title=sentences.task_title,
        worst_task=_worst_task,
    )
    return environment


def _finalize(value: object) -> object:
    """Every printed string passes here before it is escaped; Markup was printed once already."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _clip(text: str, limit: int = MAX_TEXT) -> str:
    return clip(text, limit)


def _heat(kl: float, limit: float) -> int:
    """How dark a token is drawn: 0 up to the limit, a step for each power of ten above it, at most 3.

    What is not a number is drawn as dark as can be: the model gave no probability there.
    """
    if not math.isfinite(kl):
        return 3
    return min(3, math.ceil(math.log10(kl / limit))) if kl > limit > 0 else 0


def _shown_flips(task: TaskVerdict) -> Sequence[Flip]:
    """The losses first."""
    return sorted(task.flips, key=lambda flip: flip.direction != "right to wrong")[:MAX_FLIPS]


def _worst_task(tasks: Sequence[TaskVerdict]) -> TaskVerdict:
    return min(tasks, key=lambda task: task.low)


def _worst_layers(layers: Sequence[LayerError]) -> Sequence[LayerError]:
    return sorted(layers, key=_noise_first)[:MAX_LAYERS]


def _noise_first(layer: LayerError) -> float:
    return -math.inf if math.isnan(layer.snr_db) else layer.snr_db


def _adds_to(reason: str, gate: Gate) -> bool:
    return gate.status == "FAIL" and gate.message not in reason


def _has_text(pair: _CanaryPair) -> bool:
    """Whether either model wrote something, or what it wrote could not be trusted."""
    return any(canary and (canary.text.strip() or canary.non_finite) for canary in pair[1:])


def _paired_canaries(baseline: LoadReport, candidate: LoadReport) -> Sequence[_CanaryPair]:
    """The two models' continuations by prompt; none where the candidate wrote none."""
    first = {canary.prompt: canary for canary in baseline.canaries}
    second = {canary.prompt: canary for canary in candidate.canaries}
    return [(prompt, first.get(prompt), second.get(prompt)) for prompt in {**first, **second} if second]
