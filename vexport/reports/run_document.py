"""Build the document of a run, and the table of several runs.

All formats show variants, accuracy and findings. Text and Markdown add a summary, and the HTML page
adds all other sections.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from vexport.records import Canary, ComparedRun, EngineInfo, GivenCheckpoint, LoadReport
from vexport.records.gates import finding_counts
from vexport.records.scale import NOT_AVAILABLE
from vexport.reports import document as doc
from vexport.reports.accuracy import accuracy_section, accuracy_tiles, answers_section
from vexport.reports.checkpoints import device_parts, load_facts
from vexport.reports.document import TableCell, facts, mono, muted, page_section, parts, table
from vexport.reports.findings import report_gates, staged_findings
from vexport.reports.formatting import (
    attribution_line,
    bits_per_weight,
    coverage_lines,
    duration,
    next_step,
    ratio,
    report_sentence,
    sentence,
    size,
    size_change,
    small,
    subject_of,
    unsearched_cause,
)
from vexport.reports.layers import (
    checkpoint_sections,
    drift_line,
    log_probabilities_section,
    mixed_line,
    rounding_lines,
)
from vexport.reports.run_record import CalibrationSummary, MadeCheckpoint, Report
from vexport.reports.variants import variant_sections, variant_tiles, variants_section
from vexport.words import plural

_NOT_RUN = "an earlier gate failed"
# Files of a run, most interesting first, and their descriptions.
_FILES = (
    ("checkpoint", "the quantized checkpoint"),
    ("scenario.yaml", "the scenario that was run"),
    ("report.json", "everything on this page, for programs"),
    ("report.md", "the summary in Markdown"),
    ("junit.xml", "test cases for CI"),
    ("model-card.md", "README.md for the checkpoint"),
    ("plan.json", "planned treatment of every tensor"),
    ("check.json", "findings of the check"),
    ("dry-load.json", "loads on other devices"),
    ("load.json", "the load in vLLM"),
    ("eval/baseline/vllm.log", "vLLM's log with the baseline"),
    ("eval/candidate/vllm.log", "vLLM's log with the quantized model"),
    ("eval/baseline", "lm-eval's results and samples of the baseline"),
    ("eval/candidate", "lm-eval's results and samples of the quantized model"),
    # Files of a run with a given checkpoint. If there are several checkpoints, each report is in
    # candidate/1-NAME, next to its `vllm.log`, and links to the common baseline above.
    ("baseline/vllm.log", "vLLM's log with the baseline"),
    ("candidate/vllm.log", "vLLM's log with the checkpoint"),
    ("vllm.log", "vLLM's log with the checkpoint"),
    ("baseline", "lm-eval's results and samples of the baseline"),
    ("candidate", "lm-eval's results and samples of the checkpoint"),
    ("../../baseline", "lm-eval's results and samples of the baseline"),
)
_TEXT_LEGEND = (
    "KL: divergence from the baseline in nats per token. *: the smallest checkpoint that passes."
)
_LEGEND = (
    f"{_TEXT_LEGEND} Worst task: the task with the lowest bound; its change is in points or in "
    f"units of the metric."
)


def run_document(report: Report, files: Sequence[TableCell] = ()) -> doc.Document:
    """Return the document of a run. A page links to `files`."""
    call = report.call
    created = call.created[:16].replace("T", " ")
    total = duration(sum(call.seconds.values()))
    linked = (
        "In the run directory. The links are relative to this page: move it together with the "
        "directory."
    )
    return doc.Document(
        title=report.name,
        status=report.outcome,
        device=report.device,
        ignored=report.ignored,
        sentence=report_sentence(report),
        warnings=report.verdict.warnings if report.verdict else (),
        subtitle=f"{subject_of(report)}, {created} UTC",
        next_step=next_step(report),
        # The table of variants already shows the content of their gates.
        gates=() if report.is_of_variants else report_gates(report)[:-1],
        tiles=_tiles(report),
        parts=parts(
            variants_section(report.variants) if report.is_of_variants else None,
            doc.Section("", (_summary(report, total),), forms=("text", "markdown")),
            accuracy_section(report.verdict) if report.verdict else None,
            _unsearched_cause_section(report),
            None if report.is_of_variants else variants_section(report.variants),
            variant_sections(report.variants),
            log_probabilities_section(report),
            checkpoint_sections(report.made) if report.made else None,
            _load_section(report),
            _devices(report),
            None if report.is_of_variants else _findings(report),
            answers_section(report.verdict),
            page_section("Files", "files", linked, doc.Listing(tuple(files))) if files else None,
            _provenance(report, total),
        ),
        footer=f"vexport {call.vexport}, {call.created}, {_origin(report)}, total {total}",
    )


def _origin(report: Report) -> str:
    if report.made is None:
        return f"checkpoint {report.checkpoint.name}"
    return f"source {report.made.source.name}"


def _tiles(report: Report) -> tuple[doc.Tile, ...]:
    """Return the key numbers at the top of the page: accuracy, size and load.

    A tile is left out if its number cannot be known, such as the accuracy of a given checkpoint
    that was only loaded. A run that makes its checkpoint always has accuracy tiles, which show `not
    measured` if an earlier gate failed.
    """
    if report.is_of_variants:
        return tuple(variant_tiles(report.variants))
    has_accuracy = report.made is not None or report.verdict is not None
    tiles = [
        *(accuracy_tiles(report.verdict) if has_accuracy else ()),
        _size_tile(report),
        _load_tile(report),
    ]
    return tuple(tile for tile in tiles if tile is not None)


def _summary(report: Report, total: str) -> doc.Facts:
    made = report.made
    return facts(
        ("size", size_change(made.plan)) if made else None,
        *_stored_as(report.checkpoint),
        ("auto", mixed_line(made.mixed)) if made and made.mixed else None,
        *_expert_facts(made),
        *(("rounding", line) for line in rounding_lines(made.rounding if made else None)),
        *(load_facts(report.load).rows if report.load else ()),
        ("drift", drift_line(report.drift)) if report.drift else None,
        ("cause", cause) if (cause := _cause(report)) else None,
        ("time", total),
    )


def _stored_as(checkpoint: MadeCheckpoint | GivenCheckpoint) -> Iterator[tuple[str, str]]:
    if checkpoint.scheme_names:
        yield "schemes", checkpoint.scheme_names
    if checkpoint.format:
        yield "format", checkpoint.format


def _expert_facts(made: MadeCheckpoint | None) -> Iterator[tuple[str, str]]:
    if made is not None and made.calibration is not None:
        for line in coverage_lines(made.calibration.experts):
            yield "experts", line


def _cause(report: Report) -> str:
    """Return the cause of a loss, or why it was not searched for. Return "" if neither applies."""
    if report.attribution is not None:
        return attribution_line(report.attribution)
    return unsearched_cause(report.verdict)


def _size_tile(report: Report) -> doc.Tile | None:
    checkpoint = report.checkpoint
    before, after = checkpoint.source_bytes, checkpoint.num_bytes
    parameters = checkpoint.parameters
    if before is None or after is None or parameters is None:
        return None
    was, bits = (bits_per_weight(each, parameters) for each in (before, after))
    note = f"{ratio(after, before)} of {size(before)}; {bits} bits per weight, was {was}"
    return doc.Tile("Size", size(after), "", note)


def _unsearched_cause_section(report: Report) -> doc.Section | None:
    """Return a page's section on why the cause of a loss was not searched for.

    Text and Markdown have the reason in the summary.
    """
    cause = unsearched_cause(report.verdict) if report.attribution is None else ""
    if not cause:
        return None
    return page_section("Cause", "cause", "", doc.Paragraph(sentence(cause)))


def _load_tile(report: Report) -> doc.Tile | None:
    """Return the tile on loading, or None if the run does not load a checkpoint on this machine."""
    title, load = "Loads in vLLM", report.load
    if load is None:
        return doc.Tile(title, "not run", "", _NOT_RUN) if report.made else None
    engine = load.engine
    answer = "yes" if load.ok else "no"
    note = "the engine did not start"
    if engine:
        emulated = (
            "; emulated kernels: valid for accuracy, not for speed" if engine.emulated else ""
        )
        note = f"vLLM {engine.vllm}{emulated}"
    return doc.Tile(title, answer, f"on {engine.device}" if engine and engine.device else "", note)


def _load_section(report: Report) -> doc.Section | None:
    load = report.load
    if load is None:
        lead = f"Not run: {_NOT_RUN}."
        return page_section("Load in vLLM", "load", lead) if report.made else None
    if load.engine:
        lead = (
            f"The real engine loaded the "
            f"checkpoint{'' if load.ok else ', but the load did not pass'}."
        )
    else:
        lead = "The engine did not start with this checkpoint; see the findings."
    of_baseline = report.baseline.load if report.baseline is not None else None
    engine = _engine(load, load.engine, of_baseline) if load.engine else None
    canaries = _canaries(of_baseline, load, _candidate_kind(report))
    return page_section("Load in vLLM", "load", lead, engine, canaries)


def _candidate_kind(report: Report) -> str:
    if report.verdict is not None and report.verdict.candidate in ("quantized", "unquantized"):
        return report.verdict.candidate
    return "quantized" if report.checkpoint.scheme_names else "checkpoint"


def _engine(load: LoadReport, engine: EngineInfo, baseline: LoadReport | None) -> doc.Facts:
    """Return the facts of a load for HTML. The first facts are also in the text and Markdown."""
    processes = "several processes" if engine.multiprocess else "one process"
    emulated = "emulated: valid for accuracy, not for speed" if engine.emulated else ""
    of_baseline = "did not load, because of the source or this engine"
    if baseline is not None and baseline.ok:
        of_baseline = "loads as well"
    return facts(
        *load_facts(load).rows,
        ("kernels", TableCell("\n".join(engine.kernels), emulated, mono=True)),
        (
            "process",
            f"{engine.dtype}, {processes}, torch {engine.torch}, transformers "
            f"{engine.transformers}",
        ),
        ("start", duration(engine.start_seconds)),
        ("baseline", of_baseline) if baseline is not None else None,
    )


def _canaries(baseline: LoadReport | None, candidate: LoadReport, kind: str) -> doc.Section | None:
    """Return each model's greedy continuation of the test prompts.

    Prompts that no model continued with text are counted instead, unless a log-probability is not
    finite. If the baseline did not run, only the candidate's continuations are shown. `kind` is the
    candidate's label.
    """
    if not candidate.canaries:
        return None
    models = [(kind, {canary.prompt: canary for canary in candidate.canaries})]
    if baseline is not None and baseline.canaries:
        models.insert(0, ("baseline", {canary.prompt: canary for canary in baseline.canaries}))
    prompts = dict.fromkeys(prompt for _, by_prompt in models for prompt in by_prompt)
    shown: list[doc.Exchange] = []
    for prompt in prompts:
        canaries = [(name, by_prompt.get(prompt)) for name, by_prompt in models]
        if any(canary and (canary.text.strip() or canary.non_finite) for _, canary in canaries):
            answers = tuple(_answer(name, canary) for name, canary in canaries)
            shown.append(doc.Exchange("prompt", prompt, answers))
    silent = len(prompts) - len(shown)
    who = "both models" if len(models) > 1 else "the model"
    after = f"at which {who}" if shown else who
    note = (
        f"{'Not shown:' if shown else 'At'} {plural(silent, 'prompt')} {after} ended the "
        f"text at once."
    )
    return doc.Section("Greedy continuations", parts(shown, muted(note) if silent else None))


def _answer(label: str, canary: Canary | None) -> tuple[str, str, str]:
    """Return a model's response for `doc.Exchange`: its label, its text, and "" for the tone.

    The label contains the reason why the text ended.
    """
    if canary is None:
        return label, "none", ""
    return f"{label}: {_ending(canary)}", canary.text or "nothing before the end", ""


def _ending(canary: Canary) -> str:
    """Return how a continuation ended.

    The engine continues after the model's end of text, but these tokens are not shown.
    """
    if canary.ended_after is not None:
        return f"ended by the model after {plural(canary.ended_after, 'token')}"
    tokens = plural(canary.tokens, "token")
    if canary.finish_reason == "length":
        return f"stopped at the limit of {tokens}"
    return f"{tokens}, ended by {canary.finish_reason}"


def _devices(report: Report) -> doc.Section | None:
    lead = (
        "Dry loads: vLLM's model class and weight loaders load only the headers of the checkpoint, "
        "for each tensor parallel size and compute capability."
    )
    dry = report.made.dry_load if report.made else None
    return page_section("Other devices", "devices", lead, device_parts(dry)) if dry else None


def _findings(report: Report) -> doc.Section:
    findings = staged_findings(report)
    if not findings:
        looked = "Plan, check and loads" if report.made else "The loads"
        nothing = muted(f"{looked} found nothing to report.")
        return page_section("Findings", "findings", "", nothing)
    counts = finding_counts(finding for _, finding in findings)
    return doc.Section(
        "Findings", (doc.FindingList(findings, "report.json"),), "findings", f"{counts}."
    )


def _provenance(report: Report, total: str) -> doc.Section:
    call, made = report.call, report.made
    stages = "".join(f"{stage} {duration(taken)}, " for stage, taken in call.seconds.items())
    sources = facts(
        ("Source", mono(made.source.name)) if made else None,
        ("Baseline", _baseline_cell(report)) if report.baseline is not None else None,
        ("Checkpoint", mono(_checkpoint(report))),
        *((name.capitalize(), text) for name, text in _stored_as(report.checkpoint) if not made),
        ("Architecture", made.plan.architecture) if made else None,
        ("Calibration", _calibration_cell(made.calibration)) if made else None,
        *((name.capitalize(), line) for name, line in _expert_facts(made)),
        ("Made by", f"vexport {call.vexport}, {call.created}"),
        ("Time", f"{stages}total {total}") if stages else None,
    )
    reproduce = doc.Section("Reproduce", (doc.Paragraph(call.command, "code"),))
    return page_section("Provenance", "provenance", "", sources, reproduce)


def _calibration_cell(calibration: CalibrationSummary | None) -> TableCell:
    if calibration is None:
        return TableCell("none")
    of = f" of {calibration.data}" if calibration.data else ""
    return TableCell(f"{plural(calibration.rows, 'sample')}{of}", f"sha256 {calibration.digest}")


def _baseline_cell(report: Report) -> TableCell:
    accepted = report.verdict.accepted if report.verdict is not None else None
    if accepted is None:
        return mono(report.baseline_name)
    time = accepted.accepted[:16].replace("T", " ")
    parts_ = [f"accepted {time} UTC" if time else "accepted", f"sha256 {accepted.digest}"]
    return TableCell(report.baseline_name, ", ".join(parts_), mono=True)


def _checkpoint(report: Report) -> str:
    if report.made is None:
        return report.checkpoint.name
    return report.load.checkpoint if report.load else ""


def run_files(folder: Path, start: Path) -> Sequence[TableCell]:
    """Return links to the existing files of a run directory, for a page in the folder `start`."""
    files = []
    for name, about in _FILES:
        path = folder / name
        if path.exists():
            slash = "/" if path.is_dir() else ""
            # `quote` escapes colons. A browser would read a name before a colon as a URL scheme.
            href = quote(os.path.relpath(path, start).replace(os.sep, "/")) + slash
            files.append(TableCell(name + slash, about, href=href, mono=True))
    return files


def comparison_document(runs: Sequence[ComparedRun]) -> doc.Document:
    """Return a document with the table of runs, and with the reasons of runs that did not pass."""
    best = next((run for run in runs if run.smallest), None)
    passed = sum(run.outcome == "PASS" for run in runs)
    answer = f"{passed} of {len(runs)} pass, and a size is unknown" if passed else "none passes"
    if best is not None:
        answer = f"{best.folder} is the smallest that passes"
    whys = [(run.folder, run.reason) for run in runs if run.outcome != "PASS"]
    # Runs that were judged by held-out text alone have no tasks.
    with_tasks = any(run.worst is not None for run in runs)
    change = doc.Column("change", numeric=True, noted=True)
    result = doc.Column("result", nowrap=True)
    of_tasks = ("worst task", change) if with_tasks else ()
    titles = ("run", "scheme", ">size", ">bits", ">KL", *of_tasks, result)
    rows = (_compared_cells(run, with_tasks=with_tasks) for run in runs)
    content = parts(
        doc.Paragraph(answer),
        table(titles, rows),
        muted(_LEGEND if with_tasks else _TEXT_LEGEND),
        facts(*whys) if whys else None,
    )
    return doc.Document(
        title=plural(len(runs), "run"), parts=(doc.Section("Runs", content),), wide=True
    )


def _compared_cells(run: ComparedRun, *, with_tasks: bool) -> Iterator[TableCell | str]:
    yield f"{run.folder} *" if run.smallest else run.folder
    yield run.schemes or NOT_AVAILABLE
    yield size(run.num_bytes) if run.num_bytes else NOT_AVAILABLE
    yield f"{run.bits_per_weight:.2f}" if run.bits_per_weight else NOT_AVAILABLE
    yield NOT_AVAILABLE if run.mean_kl is None else small(run.mean_kl)
    if worst := run.worst:
        yield worst.task
        yield doc.judged_cell(worst)
    elif with_tasks:
        yield from (NOT_AVAILABLE, NOT_AVAILABLE)
    yield doc.badge(run.outcome) if run.outcome else "no result"
