"""Reports of the demo model as a run would write them. The numbers are plausible, not measured.

`report.json` next to this file has all parts of a report, with the outcome PASS.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vexport.files import from_json
from vexport.records import (
    Canary,
    CheckReport,
    DryLoadReport,
    EngineInfo,
    Finding,
    Flip,
    LayerError,
    LoadReport,
    Needed,
    Outcome,
    TokenDrift,
    Verdict,
)
from vexport.reports.run_record import Baseline, MadeCheckpoint, Report, Source

HOSTILE = (
    "<script>alert(1)</script> ]]> \"'`|*_[x](http://evil.example/a) @team\n::error::x\x1b[31mred"
    "\x00\x9b2J\u202eabc\ud800\ufffe &amp; {{ 7*7 }} {% raw %} [bold]b[/bold] %0A##[error]y "
    "www.evil.example"
)
WHOLE = from_json(Report, Path(__file__).with_name("report.json"))
# Difference, low, high, lost documents and gained documents of the task that decides.
_ADDITION = {
    "PASS": (-0.0047, -0.0128, 0.0031, 5, 2),
    "FAIL": (-0.1051, -0.1268, -0.0853, 69, 2),
    "INCONCLUSIVE": (-0.0141, -0.0252, -0.0047, 11, 2),
}
_REASONS = {
    "PASS": "both tasks lose less than 2 points (worst: addition loses 0.47 points, at most 1.28)",
    "FAIL": "addition loses 10.5 points (at least 8.53), margin 2 points; the other task passes",
    "INCONCLUSIVE": "addition is not settled after 640 documents: -1.41 points, between -2.52 "
    "and -0.47, "
    "margin 2 points; about 2,900 would settle it; the other task passes",
}


assert WHOLE.verdict is not None
assert WHOLE.drift is not None
assert WHOLE.made is not None
assert WHOLE.made.dry_load is not None
assert WHOLE.attribution is not None
_VERDICT, _DRIFT, _DRY_LOAD, _CAUSE = (
    WHOLE.verdict,
    WHOLE.drift,
    WHOLE.made.dry_load,
    WHOLE.attribution,
)


def finding(severity: str = "warning", *, where: str = "model.layers.2.mlp.down_proj") -> Finding:
    """Return a finding of the given severity."""
    if severity == "error":
        return Finding(
            check="fused-scales",
            severity="error",
            where=where,
            expected="one weight_global_scale for q_proj, k_proj and v_proj",
            got="0.00217, 0.00217 and 0.00304",
            fix="export again, or run vexport repair",
        )
    (warning,) = made_of(WHOLE).check.findings
    return replace(warning, severity="warning" if severity == "warning" else "info", where=where)


def engine() -> EngineInfo:
    """Return vLLM's CPU backend with emulated NVFP4 kernels."""
    engine = load_of(WHOLE).engine
    assert engine is not None
    return engine


def load(checkpoint: str = "runs/demo-nvfp4/checkpoint") -> LoadReport:
    return replace(load_of(WHOLE), checkpoint=checkpoint)


def made_of(report: Report) -> MadeCheckpoint:
    assert report.made is not None
    return report.made


def with_made(report: Report, **changes: Any) -> Report:
    """Return the report with other facts on the checkpoint that the run made."""
    return replace(report, made=replace(made_of(report), **changes))


def with_source(report: Report, name: str, **changes: Any) -> Report:
    """Return the report with another source, with further changes."""
    return with_made(report, source=replace(made_of(report).source, name=name, **changes))


def load_of(report: Report) -> LoadReport:
    assert report.load is not None
    return report.load


def verdict(outcome: Outcome = "PASS") -> Verdict:
    """Return a verdict on two tasks. The second task has the given outcome and two flips."""
    difference, low, high, lost, gained = _ADDITION[outcome]
    facts, addition = _VERDICT.tasks
    old = facts.baseline
    value = old.value + difference
    assert facts.recovery is not None
    flip_rate = replace(facts.changes.flip_rate, value=(lost + gained) / 640)
    made = replace(
        facts,
        task="addition",
        outcome=outcome,
        documents=640,
        baseline=old,
        candidate=replace(old, value=value, low=value - 0.0091, high=value + 0.0043),
        difference=difference,
        low=low,
        high=high,
        changes=replace(
            addition.changes, right_to_wrong=lost, wrong_to_right=gained, flip_rate=flip_rate
        ),
        recovery=replace(facts.recovery, value=1 + difference / old.value),
        needed=Needed(documents=2810) if outcome == "INCONCLUSIVE" else None,
        also=addition.also,
    )
    return replace(_VERDICT, outcome=outcome, reason=_REASONS[outcome], tasks=(facts, made))


def report(outcome: Outcome = "PASS") -> Report:
    """Return a run that reached its verdict, without optional parts."""
    judged = replace(full(outcome), drift=None, attribution=None)
    source = replace(made_of(WHOLE).source, card={})
    return with_made(judged, source=source, sensitivity=None, mixed=None, dry_load=None)


def full(outcome: Outcome = "PASS") -> Report:
    """Return a run with all parts that a report can have."""
    return replace(WHOLE, outcome=outcome, reason=_REASONS[outcome], verdict=verdict(outcome))


def dry_load() -> DryLoadReport:
    """Return loads on two capabilities, with another precision on one capability."""
    return _DRY_LOAD


def unloaded() -> Report:
    """Return a run that failed its check. Its engine never started, and accuracy was not judged."""
    error = finding("error", where="model.layers.0.self_attn.qkv_proj")
    checkpoint = "runs/demo-nvfp4/checkpoint"
    findings = (finding(), error, finding("info"))
    checked = CheckReport(checkpoint=checkpoint, ok=False, findings=findings)
    return replace(
        with_made(report("FAIL"), check=checked),
        reason=f"check: {error}",
        load=None,
        verdict=None,
        call=replace(WHOLE.call, seconds={"plan": 0.21, "check": 0.9}),
    )


def hostile() -> Report:
    """Return a report with HOSTILE in all values that a checkpoint, model or data set can set."""
    base = full("FAIL")
    bad = Finding(
        check=HOSTILE, severity="error", where=HOSTILE, expected=HOSTILE, got=HOSTILE, fix=HOSTILE
    )
    texts = dict.fromkeys(("prompt", "target", "baseline", "candidate"), HOSTILE)
    flip = Flip(doc_id=1, direction="right to wrong", **texts)
    canary = Canary(prompt=HOSTILE, text=HOSTILE, tokens=3, finish_reason=HOSTILE)
    judged = verdict("FAIL")
    words = zip(HOSTILE.split(" "), (0.0, 0.02, 0.4, 3.0, 40.0), strict=False)
    tokens = tuple(
        TokenDrift(token=word, kl=kl, baseline_nll=0.01, candidate_nll=0.2) for word, kl in words
    )
    tasks = tuple(
        replace(
            task,
            task=HOSTILE,
            metric=HOSTILE,
            filter=HOSTILE,
            changes=replace(task.changes, flips=(flip,)),
            also=tuple(replace(metric, task=HOSTILE, metric=HOSTILE) for metric in task.also),
        )
        for task in judged.tasks
    )
    spoiled = replace(
        load(HOSTILE),
        ok=False,
        findings=(bad,),
        canaries=(canary,),
        engine=replace(engine(), kernels=(HOSTILE,), blind_spots=(HOSTILE,), processor=HOSTILE),
    )
    made = made_of(base)
    spoiled_checkpoint = replace(
        made,
        source=Source(name=HOSTILE, card={"license": HOSTILE, "language": (HOSTILE,)}),
        plan=replace(
            made.plan,
            source=HOSTILE,
            architecture=HOSTILE,
            kept_linears=(HOSTILE,),
            refusals=(bad,),
        ),
        layers=(LayerError(name=HOSTILE, scheme=HOSTILE, snr_db=12.0), *made.layers),
        check=CheckReport(checkpoint=HOSTILE, ok=False, findings=(bad,)),
        dry_load=replace(_DRY_LOAD, rows=(replace(_DRY_LOAD.rows[0], name=HOSTILE),)),
    )
    return replace(
        base,
        name=HOSTILE,
        reason=HOSTILE,
        call=replace(base.call, command=HOSTILE),
        made=spoiled_checkpoint,
        baseline=Baseline(name="demo/model", load=spoiled),
        load=spoiled,
        verdict=replace(judged, reason=HOSTILE, method=HOSTILE, tasks=tasks, warnings=(HOSTILE,)),
        drift=replace(_DRIFT, worst=(replace(_DRIFT.worst[0], prompt=HOSTILE, tokens=tokens),)),
        attribution=replace(_CAUSE, harness=(HOSTILE,)),
    )
