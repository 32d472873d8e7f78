"""The report of a run: a summary that every form has, and what a page shows below it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from vexport.records import Canary, EngineInfo, LoadReport, LogprobAgreement, Report
from vexport.reports import document as doc
from vexport.reports.accuracy import accuracy_section, accuracy_tiles, answers_section
from vexport.reports.checkpoints import device_parts, load_facts
from vexport.reports.document import PAGE, SUMMARY, facts, muted, parts, row
from vexport.reports.formatting import bits_per_weight, count, duration, percent, plural, ratio, size, small
from vexport.reports.gates import finding_counts, report_gates, staged_findings
from vexport.reports.layers import (
    mixed_line,
    noise_section,
    rounding_lines,
    rounding_section,
    sensitivity_sections,
    signals_section,
    size_section,
)
from vexport.reports.sentences import (
    coverage_lines,
    next_step,
    report_device,
    report_sentence,
    schemes_in_use,
    served_with,
    signal_lines,
    size_change,
)

_NOT_RUN = "an earlier gate failed"


# In the order of a reader's interest: what a run writes (vexport.run, vexport.run.serving), and what it is.
_FILES = (
    ("checkpoint", "the quantized checkpoint"),
    ("scenario.yaml", "the scenario that was run"),
    ("report.json", "everything on this page, for programs"),
    ("report.md", "the summary in Markdown"),
    ("junit.xml", "test cases for CI"),
    ("model-card.md", "README.md for the checkpoint"),
    ("plan.json", "what was to be done to every tensor"),
    ("check.json", "findings of the check"),
    ("dry-load.json", "loads on other devices"),
    ("load.json", "the load in vLLM"),
    ("eval/baseline/vllm.log", "vLLM's log with the baseline"),
    ("eval/candidate/vllm.log", "vLLM's log with the quantized model"),
    ("eval/baseline", "lm-eval's results and samples of the baseline"),
    ("eval/candidate", "lm-eval's results and samples of the quantized model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A file or folder of a run directory, as a link relative to the page."""

    name: str
    href: str
    about: str


def run_document(report: Report, files: Sequence[RunFile] = ()) -> doc.Document:
    """Everything that a run found; a page links to `files`."""
    created = report.created[:16].replace("T", " ")
    return doc.Document(
        title=report.name,
        status=report.outcome,
        device=report_device(report),
        sentence=report_sentence(report),
        subtitle=f"{schemes_in_use(report.plan)} of {report.source_name or report.source}, {created} UTC",
        next_step=next_step(report),
        gates=report_gates(report)[:-1],
        tiles=(*accuracy_tiles(report.verdict), _size_tile(report), _load_tile(report)),
        parts=parts(
            doc.Section("", (_summary(report),), forms=SUMMARY),
            accuracy_section(report.verdict) if report.verdict else None,
            signals_section(report),
            size_section(report),
            noise_section(report.layers),
            rounding_section(report.rounding),
            sensitivity_sections(report),
            _load_section(report),
            _devices(report),
            _findings(report),
            answers_section(report.verdict),
            _files(files),
            _provenance(report),
        ),
        footer=f"vexport {report.vexport}, {report.created}, source {report.source}, total {_total(report)}",
    )


def _total(report: Report) -> str:
    return duration(sum(report.seconds.values()))


def _summary(report: Report) -> doc.Facts:
    """A line for each thing to know: size, schemes, coverage, the engine, the signals."""
    return facts(
        ("size", size_change(report.plan)),
        ("schemes", schemes_in_use(report.plan)),
        ("auto", mixed_line(report.mixed)) if report.mixed else None,
        *(("experts", line) for line in coverage_lines(report.experts)),
        *(("rounding", line) for line in rounding_lines(report.rounding)),
        *load_facts(report.load).rows,
        *signal_lines(report),
        ("time", _total(report)),
    )


def _size_tile(report: Report) -> doc.Tile:
    plan = report.plan
    before, after = plan.source_bytes, plan.output_bytes
    bits = f"{bits_per_weight(after, plan.parameters)} bits per weight"
    was = bits_per_weight(before, plan.parameters)
    return doc.Tile("Size", size(after), "", f"{ratio(after, before)} of {size(before)}; {bits}, was {was}")


def _load_tile(report: Report) -> doc.Tile:
    load, device = report.load, report.load.engine.device if report.load.engine else ""
    answer = "yes" if load.ok else "no" if load.engine or load.findings else "not run"
    note = "the engine did not start" if load.findings else _NOT_RUN
    if load.engine:
        emulated = "; emulated kernels: the format's numbers, not its speed" if load.engine.emulated else ""
        note = f"vLLM {load.engine.vllm}{emulated}"
    return doc.Tile("Loads in vLLM", answer, f"on {device}" if device else "", note)


def _load_section(report: Report) -> doc.Section:
    load = report.load
    lead = f"Not run: {_NOT_RUN}."
    if load.engine:
        lead = f"The real engine loaded the checkpoint{'' if load.ok else ', but the load did not pass'}."
    elif load.findings:
        lead = "The engine did not start with this checkpoint; see the findings."
    content = parts(
        _engine(load.engine, load.logprobs, baseline_ok=report.baseline_load.ok) if load.engine else None,
        _canaries(report.baseline_load, load),
    )
    return doc.Section("Load in vLLM", content, anchor="load", lead=lead, forms=PAGE)


def _engine(
    engine: EngineInfo, agreement: LogprobAgreement | None, *, baseline_ok: bool
) -> tuple[doc.Part, ...]:
    processes = "several processes" if engine.multiprocess else "one process"
    emulated = "emulated: the numbers are the format's, the speed is not" if engine.emulated else ""
    baseline = "loads as well" if baseline_ok else "did not load: the cause is the source or this engine"
    spots = doc.Listing(row(*engine.blind_spots), "What this platform cannot show")
    rows = facts(
        ("Engine", f"vLLM {engine.vllm}, torch {engine.torch}, transformers {engine.transformers}"),
        ("Platform", f"{engine.platform}, {engine.processor}, {engine.dtype}, {processes}"),
        ("Served with", served_with(engine)) if engine.settings else None,
        ("Kernels", doc.TableCell("\n".join(engine.kernels), emulated, mono=True)),
        ("Start", duration(engine.start_seconds)),
        ("Baseline", baseline),
        ("Log-probabilities", _agreement(agreement)) if agreement else None,
    )
    return parts(rows, spots if engine.blind_spots else None)


def _agreement(agreement: LogprobAgreement) -> doc.TableCell:
    return doc.TableCell(
        f"mean KL {small(agreement.mean_kl)} nats per token against {agreement.reference}, limit "
        f"{small(agreement.limit)}; at most {small(agreement.max_kl)}",
        f"first choice agrees at {percent(agreement.top1_agreement)} of {count(agreement.positions)} "
        f"positions in {count(agreement.prompts)} prompts",
    )


def _canaries(baseline: LoadReport, candidate: LoadReport) -> doc.Section | None:
    """The greedy continuations of both models; those that say nothing are counted."""
    first = {canary.prompt: canary for canary in baseline.canaries}
    second = {canary.prompt: canary for canary in candidate.canaries}
    pairs = [(prompt, first.get(prompt), second.get(prompt)) for prompt in {**first, **second} if second]
    if not pairs:
        return None
    shown = [
        doc.Exchange("prompt", prompt, (_answer("baseline", before), _answer("quantized", after)))
        for prompt, before, after in pairs
        if any(canary and (canary.text.strip() or canary.non_finite) for canary in (before, after))
    ]
    silent = len(pairs) - len(shown)
    both = "at which both models" if shown else "both models"
    note = f"{'Not shown:' if shown else 'At'} {plural(silent, 'prompt')} {both} ended the text at once."
    return doc.Section("Greedy continuations", parts(shown, muted(note) if silent else None))


def _answer(label: str, canary: Canary | None) -> tuple[str, str, str]:
    if canary is None:
        return label, "none", ""
    end = f"ended by {canary.finish_reason}"
    if canary.ended_after is not None:
        end = f"the model ended it after {count(canary.ended_after)}"
    return f"{label}, {count(canary.tokens)} tokens, {end}", canary.text or "nothing before the end", ""


def _devices(report: Report) -> doc.Section | None:
    if not report.dry_load:
        return None
    lead = (
        "The model class and weight loaders of vLLM on headers alone, for each tensor parallel size and "
        "compute capability."
    )
    content = device_parts(report.dry_load)
    return doc.Section("Other devices", content, anchor="devices", lead=lead, forms=PAGE)


def _findings(report: Report) -> doc.Section:
    findings = staged_findings(report)
    if not findings:
        nothing = muted("Plan, check and both loads found nothing to report.")
        return doc.Section("Findings", (nothing,), anchor="findings", forms=PAGE)
    counts = finding_counts([finding for _, finding in findings])
    return doc.Section(
        "Findings", (doc.FindingList(findings, "report.json"),), anchor="findings", lead=f"{counts}."
    )


def _files(files: Sequence[RunFile]) -> doc.Section | None:
    items = tuple(doc.TableCell(file.name, file.about, href=file.href, mono=True) for file in files)
    lead = "In the run directory. The links are relative to this page: move them together."
    return (
        doc.Section("Files", (doc.Listing(items),), anchor="files", lead=lead, forms=PAGE) if items else None
    )


def _provenance(report: Report) -> doc.Section:
    of = f" of {report.calibration_data}" if report.calibration_data else ""
    rows = f"{plural(report.calibration_rows, 'sample')}{of}" if report.calibration_rows else "none"
    digest = f"sha256 {report.calibration_digest}" if report.calibration_digest else ""
    stages = "".join(f"{stage} {duration(taken)}, " for stage, taken in report.seconds.items())
    sources = facts(
        ("Source", doc.TableCell(report.source, mono=True)),
        ("Baseline", doc.TableCell(report.baseline, mono=True)),
        ("Checkpoint", doc.TableCell(report.load.checkpoint, mono=True)),
        ("Architecture", report.plan.architecture),
        ("Calibration", doc.TableCell(rows, digest)),
        *(("Experts", line) for line in coverage_lines(report.experts)),
        ("Made by", f"vexport {report.vexport}, {report.created}"),
        ("Time", f"{stages}total {_total(report)}") if stages else None,
    )
    reproduce = doc.Section("Reproduce", (doc.Code(report.command),))
    return doc.Section("Provenance", (sources, reproduce), anchor="provenance", forms=PAGE)


def run_files(folder: Path, start: Path) -> Sequence[RunFile]:
    """The files that exist, for a page in the folder `start`."""
    files = []
    for name, about in _FILES:
        path = folder / name
        if path.exists():
            shown = f"{name}/" if path.is_dir() else name
            # A colon in the first part of a link is no scheme, since that part is escaped.
            href = quote(os.path.relpath(path, start).replace(os.sep, "/")) + ("/" if path.is_dir() else "")
            files.append(RunFile(name=shown, href=href, about=about))
    return tuple(files)
