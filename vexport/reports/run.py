"""The report of a run: a summary that every form has, and what a page shows below it."""

from collections.abc import Sequence

from vexport.reports.accuracy import accuracy_section, accuracy_tiles, answers_section
from vexport.reports.checkpoints import device_parts, load_facts
from vexport.reports.coverage import coverage_lines
from vexport.reports.document import (
    Cell,
    Code,
    Document,
    Exchange,
    Facts,
    FindingList,
    Listing,
    Paragraph,
    Part,
    Section,
    Side,
    Tile,
)
from vexport.reports.files import RunFile
from vexport.reports.formatting import bits_per_weight, count, duration, percent, plural, ratio, size, small
from vexport.reports.gates import finding_counts, report_gates, staged_findings
from vexport.reports.layers import noise_section, sensitivity_sections, signals_section, size_section
from vexport.reports.mixing import attempt_line, mixed_line
from vexport.reports.sentences import (
    next_step,
    report_device,
    report_sentence,
    schemes_in_use,
    served_with,
    signal_lines,
    size_change,
)
from vexport.types import Canary, EngineInfo, LoadReport, LogprobAgreement, Report

_NOT_RUN = "an earlier gate failed"
# A prompt, and what the baseline and the quantized model wrote after it.
_CanaryPair = tuple[str, Canary | None, Canary | None]


def run_document(report: Report, files: Sequence[RunFile] = ()) -> Document:
    """Everything that a run found; a page links to `files`."""
    made = report.created[:16].replace("T", " ")
    total = duration(sum(report.seconds.values()))
    return Document(
        title=report.name,
        status=report.outcome,
        device=report_device(report),
        sentence=report_sentence(report),
        subtitle=f"{schemes_in_use(report.plan)} of {report.source_name or report.source}, {made} UTC",
        next_step=next_step(report),
        gates=report_gates(report)[:-1],
        tiles=(*accuracy_tiles(report.verdict), _size_tile(report), _load_tile(report)),
        parts=(
            Section(title="", parts=(_summary(report),), forms=("text", "markdown")),
            *((accuracy_section(report.verdict),) if report.verdict else ()),
            *signals_section(report),
            size_section(report),
            *noise_section(report.layers),
            *sensitivity_sections(report),
            _load_section(report),
            *_devices(report),
            _findings(report),
            *answers_section(report.verdict),
            *_files(files),
            _provenance(report),
        ),
        footer=f"vexport {report.vexport}, {report.created}, source {report.source}, total {total}",
    )


def _summary(report: Report) -> Facts:
    """A line for each thing to know: size, schemes, coverage, the engine, the signals."""
    lines = [
        ("size", size_change(report.plan)),
        ("schemes", schemes_in_use(report.plan)),
        *((("auto", mixed_line(report.mixed)),) if report.mixed else ()),
        *((f"round {attempt.number}", attempt_line(attempt)) for attempt in report.attempts),
        *(("experts", line) for line in coverage_lines(report.experts)),
        *((label, cell.text) for label, cell in load_facts(report.load)),
        *signal_lines(report),
        ("time", duration(sum(report.seconds.values()))),
    ]
    return Facts(tuple((label, Cell(line)) for label, line in lines))


def _size_tile(report: Report) -> Tile:
    plan = report.plan
    before, after = plan.source_bytes, plan.output_bytes
    return Tile(
        label="Size",
        figure=size(after),
        note=f"{ratio(after, before)} of {size(before)}; {bits_per_weight(after, plan.parameters)} bits per "
        f"weight, was {bits_per_weight(before, plan.parameters)}",
    )


def _load_tile(report: Report) -> Tile:
    load, device = report.load, report_device(report)
    tried = bool(load.engine or load.findings)
    if load.engine:
        emulated = "; emulated kernels: the format's numbers, not its speed" if load.engine.emulated else ""
        note = f"vLLM {load.engine.vllm}{emulated}"
    else:
        note = "the engine did not start" if load.findings else _NOT_RUN
    return Tile(
        label="Loads in vLLM",
        figure="yes" if load.ok else "no" if tried else "not run",
        unit=f"on {device}" if device else "",
        note=note,
    )


def _load_section(report: Report) -> Section:
    load = report.load
    if load.engine:
        lead = f"The real engine loaded the checkpoint{'' if load.ok else ', but the load did not pass'}."
    elif load.findings:
        lead = "The engine did not start with this checkpoint; see the findings."
    else:
        lead = f"Not run: {_NOT_RUN}."
    parts = _engine(load.engine, load.logprobs, baseline_ok=report.baseline_load.ok) if load.engine else ()
    return Section(
        title="Load in vLLM",
        anchor="load",
        lead=lead,
        parts=(*parts, *_canaries(report.baseline_load, load)),
        forms=("html",),
    )


def _engine(engine: EngineInfo, agreement: LogprobAgreement | None, *, baseline_ok: bool) -> tuple[Part, ...]:
    processes = "several processes" if engine.multiprocess else "one process"
    emulated = "emulated: the numbers are the format's, the speed is not" if engine.emulated else ""
    baseline = "loads as well" if baseline_ok else "did not load: the cause is the source or this engine"
    facts = [
        ("Engine", Cell(f"vLLM {engine.vllm}, torch {engine.torch}, transformers {engine.transformers}")),
        ("Platform", Cell(f"{engine.platform}, {engine.processor}, {engine.dtype}, {processes}")),
        *((("Served with", Cell(served_with(engine))),) if engine.settings else ()),
        ("Kernels", Cell("\n".join(engine.kernels), emulated, mono=True)),
        ("Start", Cell(duration(engine.start_seconds))),
        ("Baseline", Cell(baseline)),
        *((("Log-probabilities", _agreement(agreement)),) if agreement else ()),
    ]
    spots = Listing(tuple(map(Cell, engine.blind_spots)), "What this platform cannot show")
    return Facts(tuple(facts)), *((spots,) if engine.blind_spots else ())


def _agreement(agreement: LogprobAgreement) -> Cell:
    return Cell(
        f"mean KL {small(agreement.mean_kl)} nats per token against {agreement.reference}, limit "
        f"{small(agreement.limit)}; at most {small(agreement.max_kl)}",
        f"first choice agrees at {percent(agreement.top1_agreement)} of {count(agreement.positions)} "
        f"positions in {count(agreement.prompts)} prompts",
    )


def _canaries(baseline: LoadReport, candidate: LoadReport) -> tuple[Section, ...]:
    """The greedy continuations of both models; those that say nothing are counted."""
    first = {canary.prompt: canary for canary in baseline.canaries}
    second = {canary.prompt: canary for canary in candidate.canaries}
    pairs = [(prompt, first.get(prompt), second.get(prompt)) for prompt in {**first, **second} if second]
    if not pairs:
        return ()
    shown = [_exchange(pair) for pair in pairs if _has_text(pair)]
    silent = len(pairs) - len(shown)
    both = "at which both models" if shown else "both models"
    note = f"{'Not shown:' if shown else 'At'} {plural(silent, 'prompt')} {both} ended the text at once."
    notes = (Paragraph(note, "muted"),) if silent else ()
    return (Section(title="Greedy continuations", parts=(*shown, *notes)),)


def _has_text(pair: _CanaryPair) -> bool:
    """Whether either model wrote something, or what it wrote could not be trusted."""
    return any(canary and (canary.text.strip() or canary.non_finite) for canary in pair[1:])


def _exchange(pair: _CanaryPair) -> Exchange:
    prompt, before, after = pair
    sides = (_side("baseline", before), _side("quantized", after))
    return Exchange(label="prompt", prompt=prompt, sides=sides)


def _side(label: str, canary: Canary | None) -> Side:
    if canary is None:
        return Side(label=label, text="none")
    end = (
        f"ended by {canary.finish_reason}"
        if canary.ended_after is None
        else f"the model ended it after {count(canary.ended_after)}"
    )
    text = canary.text or "nothing before the end"
    return Side(label=f"{label}, {count(canary.tokens)} tokens, {end}", text=text)


def _devices(report: Report) -> tuple[Section, ...]:
    if not report.dry_load:
        return ()
    return (
        Section(
            title="Other devices",
            anchor="devices",
            lead="The model class and weight loaders of vLLM on headers alone, for each tensor parallel size "
            "and compute capability.",
            parts=device_parts(report.dry_load),
            forms=("html",),
        ),
    )


def _findings(report: Report) -> Section:
    findings = staged_findings(report)
    if not findings:
        nothing = Paragraph("Plan, check and both loads found nothing to report.", "muted")
        return Section(title="Findings", anchor="findings", parts=(nothing,), forms=("html",))
    return Section(
        title="Findings",
        anchor="findings",
        lead=f"{finding_counts([finding for _, finding in findings])}.",
        parts=(FindingList(findings=findings, everything="report.json"),),
    )


def _files(files: Sequence[RunFile]) -> tuple[Section, ...]:
    if not files:
        return ()
    items = tuple(Cell(file.name, file.about, href=file.href, mono=True) for file in files)
    return (
        Section(
            title="Files",
            anchor="files",
            lead="In the run directory. The links are relative to this page: move them together.",
            parts=(Listing(items),),
            forms=("html",),
        ),
    )


def _provenance(report: Report) -> Section:
    rows = f"{count(report.calibration_rows)} rows" if report.calibration_rows else "none"
    digest = f"sha256 {report.calibration_digest}" if report.calibration_digest else ""
    stages = [f"{stage} {duration(taken)}" for stage, taken in report.seconds.items()]
    facts = (
        ("Source", Cell(report.source, mono=True)),
        ("Baseline", Cell(report.baseline, mono=True)),
        ("Checkpoint", Cell(report.load.checkpoint, mono=True)),
        ("Architecture", Cell(report.plan.architecture)),
        ("Calibration", Cell(rows, digest)),
        *(("Experts", Cell(line)) for line in coverage_lines(report.experts)),
        ("Made by", Cell(f"vexport {report.vexport}, {report.created}")),
        *(
            (("Time", Cell(f"{', '.join(stages)}, total {duration(sum(report.seconds.values()))}")),)
            if stages
            else ()
        ),
    )
    reproduce = Section(title="Reproduce", parts=(Code(report.command),))
    return Section(title="Provenance", anchor="provenance", parts=(Facts(facts), reproduce), forms=("html",))
