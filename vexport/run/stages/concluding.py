"""Run the last stages of a run: the outcome, the cause of a loss, and the report."""

import logging
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from vexport.checkpoint.index import SourceIndex, find_quantization, read_index
from vexport.checks.vllm.stored_schemes import stored_schemes
from vexport.files import write_text
from vexport.judge.attribution import NllRise
from vexport.judge.attribution import attribute as find_cause
from vexport.outputs.manifest import record
from vexport.records import (
    Attribution,
    CheckReport,
    ComparedVariant,
    DryLoadReport,
    GivenCheckpoint,
    LoadReport,
    Outcome,
    Verdict,
    named,
)
from vexport.records.gates import checkpoint_gate
from vexport.reports import render
from vexport.reports.run_record import Baseline, Call, Report
from vexport.run.comparison import outcome_of_variants, reason_of_variants
from vexport.run.directory import REPORT_FILE, portable
from vexport.run.run import Run
from vexport.run.side import Side
from vexport.run.stages import serving
from vexport.run.stages.variants import compare_variants
from vexport.run.work import Stage
from vexport.version import __version__

LOG = logging.getLogger(__name__)
# The forms of the report, by file. The page comes last, because it links to existing files.
RENDERED = {"report.md": "markdown", "junit.xml": "junit", "report.html": "html"}
MODEL_CARD = "model-card.md"


Gate = CheckReport | DryLoadReport | LoadReport


class Conclusion(NamedTuple):
    """Outcome of a run, and the sentence that justifies it."""

    outcome: Outcome
    reason: str


def _has_outcome(run: Run) -> bool:
    return run.evaluate is None or run.baseline is not None or bool(run.variants)


@partial(Stage, "conclude", Conclusion, when=_has_outcome)
def conclude(run: Run) -> Conclusion:
    """Decide the outcome from all stages.

    The first failure of the checkpoint decides, then the verdict, then a failure of the variants.
    The outcome is PASS only if the checkpoint and all variants pass.
    """
    rows = _variants_of(run)
    if rows and run.baseline is None:
        return Conclusion(outcome_of_variants(rows), reason_of_variants(rows))
    verdict = run.get(serving.judge)
    conclusion = conclusion_of_checkpoint(_gates(run), verdict, is_made=run.made is not None)
    if not rows:
        return conclusion
    outcome, reason = outcome_of_variants(rows), reason_of_variants(rows)
    if conclusion.outcome == "FAIL" or (conclusion.outcome != "PASS" and outcome != "FAIL"):
        return conclusion
    if outcome == "PASS":
        return Conclusion("PASS", f"{conclusion.reason}; variants: {reason}")
    return Conclusion(outcome, f"variants: {reason}")


def _variants_of(run: Run) -> tuple[ComparedVariant, ...]:
    results = run.find(compare_variants)
    return () if results is None else results.rows


def conclusion_of_checkpoint(
    gates: Iterable[tuple[str, Gate]], verdict: Verdict | None, *, is_made: bool
) -> Conclusion:
    """Decide by the first report in `gates` that failed, or else by the verdict."""
    for gate, found in gates:
        if not found.ok:
            return Conclusion("FAIL", f"{gate}: {checkpoint_gate(gate, found).message}")
    if verdict is not None:
        return Conclusion(verdict.outcome, verdict.reason)
    if not is_made:
        return Conclusion("PASS", "load found no error; accuracy was not evaluated")
    reason = (
        "check and load found no error; accuracy was not evaluated (no `evaluate` in the scenario)"
    )
    return Conclusion("PASS", reason)


def _gates(run: Run) -> Iterator[tuple[str, Gate]]:
    if run.made is not None:
        yield "check", run.made.check
        if run.made.dry_load is not None:
            yield "dry load", run.made.dry_load
    load = run.get(serving.load_candidate)
    if load is not None:
        yield "load", load


def _wants_cause(run: Run) -> bool:
    conclusion = run.get(conclude)
    is_local = serving.local_sessions(run) is not None
    return is_local and conclusion is not None and run.attribution.is_due(conclusion.outcome)


class _OutOfTime(Exception):
    """Raised to stop the search when its time is over."""


@partial(Stage, "attribute", Attribution, when=_wants_cause)
def attribute(run: Run) -> Attribution | None:
    """Find the cause of a loss.

    Returns None if vLLM refused a model, or if the search took too long.
    """
    sessions = serving.local_sessions(run)
    assert sessions is not None
    if not all(session.is_scored for session in sessions):
        return None
    seconds = run.attribution.seconds
    deadline = time.monotonic() + seconds
    on_progress = named("attribution", run.options.on_progress)

    def report_progress(stage: str, done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime
        on_progress(stage, done, total)

    verdict = run.get(serving.judge)
    text = verdict.text if verdict is not None else None
    try:
        return find_cause(
            *sessions,
            limit=run.evaluation.kl_limit,
            outcome=run.result(conclude).outcome,
            nll_rise=_high_nll_rise(run),
            is_late=text is not None and text.fails_late,
            vllm_python=run.options.vllm_python,
            on_progress=report_progress,
        )
    except _OutOfTime:
        LOG.info(
            "attribution: stopped after %g s (--attribution-seconds); the verdict stands", seconds
        )
        return None


def _high_nll_rise(run: Run) -> NllRise | None:
    """Return the rise of the NLL above its limit, or None.

    It is measured on the held-out text in its worst bucket, or on the prompts.
    """
    limit = run.evaluation.nll_limit
    verdict, drift = run.get(serving.judge), run.get(serving.measure_drift)
    if verdict is not None and verdict.text is not None:
        rises = [each.value for each in verdict.text.limits if each.is_rise]
    else:
        rises = [drift.nll_rise] if drift is not None else []
    highest = max(rises, default=limit)
    return NllRise(value=highest, limit=limit) if highest > limit else None


@partial(Stage, "report", Report, writes=(REPORT_FILE, *RENDERED), when=_has_outcome)
def report(run: Run) -> Report:
    """Write the report of the run in all its forms."""
    found = collect_report(run)
    forms = {REPORT_FILE: "json", **RENDERED}
    if found.made is not None:
        forms = {MODEL_CARD: "card", **forms}
    for name, format_ in forms.items():
        record(run.folder / name)
        write_text(run.folder / name, render(found, format_, folder=run.folder))
    return found


def collect_report(run: Run) -> Report:
    """Collect all results that the run has so far."""
    conclusion = run.result(conclude)
    load = run.find(serving.load_candidate)
    return Report(
        name=run.name,
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        call=_call(run.seconds),
        made=run.made,
        given=None if run.made is not None else _given_checkpoint(run),
        baseline=_baseline(run),
        load=load or serving.load_of(run, serving.serve_candidate),
        verdict=run.find(serving.judge),
        drift=run.find(serving.measure_drift),
        attribution=run.find(attribute),
        variants=_variants_of(run),
    )


def _baseline(run: Run) -> Baseline | None:
    rows = _variants_of(run)
    if run.baseline is None:
        return Baseline(name=rows[0].name) if rows else None
    load = run.find(serving.load_baseline)
    return Baseline(
        name=portable(run.baseline.name),
        load=load or serving.load_of(run, serving.serve_baseline),
    )


def _given_checkpoint(run: Run) -> GivenCheckpoint:
    index = _index_of(run.candidate)
    baseline = _index_of(run.baseline)
    quantization = find_quantization(index.root, index.config) if index else None
    values = quantization.values if quantization else {}
    return GivenCheckpoint(
        name=portable(run.candidate.name),
        schemes=stored_schemes(index.root) if index else (),
        format=str(values.get("format") or values.get("quant_method") or ""),
        num_bytes=index.num_bytes if index else None,
        source_bytes=baseline.num_bytes if baseline else None,
        parameters=baseline.num_parameters if baseline else None,
    )


def _index_of(side: Side | None) -> SourceIndex | None:
    if side is None or side.checkpoint is None:
        return None
    return read_index(side.checkpoint)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _call(seconds: Mapping[str, float]) -> Call:
    command = shlex.join(["vexport", *map(portable, sys.argv[1:])])
    return Call(vexport=__version__, created=now(), command=command, seconds=seconds)


STAGES_UP_TO_LOAD: tuple[Stage[object], ...] = (
    serving.serve_baseline,
    serving.serve_candidate,
    serving.load_baseline,
    serving.load_candidate,
)
STAGES_UP_TO_VERDICT: tuple[Stage[object], ...] = (
    serving.serve_baseline,
    serving.serve_candidate,
    *serving.COMPARISON,
    compare_variants,
    conclude,
)
STAGES: tuple[Stage[object], ...] = (*STAGES_UP_TO_VERDICT, attribute, report)
"""All stages of a run, in their order."""
