"""The last stages: the outcome, the cause of a loss, and the report."""

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vexport.checkpoint.hub import HubName, pinned_name
from vexport.checkpoint.index import SourceIndex
from vexport.files import from_json, write_text
from vexport.records import (
    Attribution,
    CheckReport,
    DryLoadReport,
    KindSize,
    LayerErrors,
    LoadReport,
    Outcome,
    Report,
    Verdict,
)
from vexport.records.calibration import expert_coverage
from vexport.reports import render
from vexport.reports.card import inherited_card
from vexport.reports.findings import checkpoint_gate
from vexport.run.directory import LAYERS, REPORT_FILE, portable, rounding_of
from vexport.run.judging import cause_of
from vexport.run.making import CALIBRATION, CHECKED, MIXED, PLAN, SENSITIVITY, WRITTEN
from vexport.run.proving import (
    DRIFT,
    DRY_LOADED,
    LOADED,
    LOADED_BASELINE,
    SERVED_BASELINE,
    SERVED_CANDIDATE,
    VERDICT,
    is_served,
)
from vexport.run.state import Run, Stage
from vexport.version import __version__

NOT_RUN = LoadReport(checkpoint="", ok=False, findings=())
# The page comes last: it links to what is there.
RENDERED = {"report.md": "markdown", "junit.xml": "junit", "model-card.md": "card", "report.html": "html"}
# A kind below this share of both checkpoints is counted among the others.
_LEAST_SHARE = 0.005
OTHERS = "others"
# The hub's cache: models--ORG--NAME/snapshots/REVISION (huggingface_hub.constants, REPO_ID_SEPARATOR).
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
# What a folder is called that is named after its role; the folder around it has the name.
_ROLES = {"model", "checkpoint", "source", "snapshot", "hf", "weights", "final", "main", "output"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The outcome and the sentence that justifies it."""

    outcome: Outcome
    reason: str


def _conclude(run: Run) -> Conclusion:
    loaded = run.get(LOADED) or NOT_RUN
    outcome, reason = conclude(run.result(CHECKED), run.get(DRY_LOADED), loaded, run.get(VERDICT))
    return Conclusion(outcome=outcome, reason=reason)


def conclude(
    checked: CheckReport, dry: DryLoadReport | None, loaded: LoadReport, verdict: Verdict | None
) -> tuple[Outcome, str]:
    """The outcome and the sentence that justifies it: the first stage that failed decides."""
    for stage, report in (("check", checked), ("dry load", dry), ("load", loaded)):
        if report is not None and not report.ok:
            return "FAIL", f"{stage}: {checkpoint_gate(stage, report).message}"
    if verdict is None:
        return (
            "PASS",
            "check and load found no error; accuracy was not evaluated (no `evaluate` in the scenario)",
        )
    return verdict.outcome, verdict.reason


CONCLUSION = Stage("conclude", Conclusion, _conclude, reads=(CHECKED, DRY_LOADED, LOADED, VERDICT))


def _attribute(run: Run) -> Attribution | None:
    """Find the cause of a loss."""
    sessions = run.result(SERVED_BASELINE), run.result(SERVED_CANDIDATE)
    outcome = run.result(CONCLUSION).outcome
    return cause_of(*sessions, run.scenario.evaluate, outcome, run.options, run.explaining.seconds)


# Of a pass too, whose report shows the floor of noise.
ATTRIBUTION = Stage(
    "attribute",
    Attribution,
    _attribute,
    when=lambda run: is_served(run) and run.explaining.wanted is not False,
    reads=(SERVED_BASELINE, SERVED_CANDIDATE, CONCLUSION),
)


def _report(run: Run) -> Report:
    """Everything the run found, in its files too."""
    report = _all_of(run)
    write_text(run.folder / REPORT_FILE, render(report, "json"))
    for name, format_ in RENDERED.items():
        write_text(run.folder / name, render(report, format_, folder=run.folder))
    return report


def _all_of(run: Run) -> Report:
    scenario, root = run.scenario, run.index.root
    plan, conclusion = run.result(PLAN), run.result(CONCLUSION)
    calibration, sensitivity = run.get(CALIBRATION), run.get(SENSITIVITY)
    rounding, pinned = rounding_of(run.folder), pinned_name(root)
    if calibration is not None and rounding is not None:
        calibration = rounding.completed(calibration)
    return Report(
        name=scenario.name,
        vexport=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["vexport", *map(portable, sys.argv[1:])]),
        source=portable(scenario.source),
        source_name=source_name(scenario.source, root),
        source_revision=pinned.partition("@")[2] if pinned else None,
        source_card=inherited_card(root),
        baseline=portable(str(run.baseline)),
        outcome=conclusion.outcome,
        reason=conclusion.reason,
        plan=plan,
        sizes=size_by_kind(run.index, run.result(WRITTEN)),
        layers=from_json(LayerErrors, run.folder / LAYERS).layers,
        calibration_rows=len(calibration.rows) if calibration else 0,
        calibration_data=portable(calibration.data) if calibration else "",
        calibration_digest=calibration.digest if calibration else None,
        experts=expert_coverage(calibration) if calibration else (),
        rounding=rounding,
        check=run.result(CHECKED),
        dry_load=run.get(DRY_LOADED),
        baseline_load=run.get(LOADED_BASELINE) or NOT_RUN,
        load=run.get(LOADED) or NOT_RUN,
        verdict=run.get(VERDICT),
        drift=run.get(DRIFT),
        attribution=run.get(ATTRIBUTION),
        sensitivity=sensitivity,
        mixed=run.get(MIXED),
        seconds=run.directory.seconds,
    )


REPORT = Stage(
    "report",
    Report,
    _report,
    reads=(
        *(PLAN, CALIBRATION, SENSITIVITY, MIXED, WRITTEN, CHECKED, DRY_LOADED, LOADED_BASELINE, LOADED),
        *(DRIFT, VERDICT, CONCLUSION, ATTRIBUTION),
    ),
)


def source_name(source: str, root: Path) -> str:
    """Return a model's id on the hub where that is known, else the name of its folder.

    `source` is the name that the scenario gives, `root` the folder that it became.
    """
    for path in (source, root.as_posix()):
        if cached := _CACHED.search(path):
            return f"{cached[1]}/{cached[2]}"
    if not Path(source).expanduser().exists() and (model := HubName.parse(source)):
        return model.id
    parts = [part for part in root.resolve().parts if part != root.anchor]
    named = [part for part in parts if part.lower() not in _ROLES]
    return (named or parts or [source])[-1]


def size_by_kind(source: SourceIndex, written: SourceIndex) -> tuple[KindSize, ...]:
    """The largest of the source first; all kinds together have all bytes of both."""
    before, after = Counter[str](), Counter[str]()
    for index, sizes_by_kind in ((source, before), (written, after)):
        for name, tensor in index.tensors.items():
            sizes_by_kind[tensor_kind(name)] += tensor.num_bytes
    sizes: dict[str, tuple[int, int]] = {}
    for kind in before | after:
        pair = (before[kind], after[kind])
        wholes = source.num_bytes, written.num_bytes
        shown = any(part >= _LEAST_SHARE * max(1, whole) for part, whole in zip(pair, wholes, strict=True))
        name = kind if shown else OTHERS
        old = sizes.get(name, (0, 0))
        sizes[name] = (old[0] + pair[0], old[1] + pair[1])
    ordered = sorted(sizes.items(), key=lambda item: (item[0] == OTHERS, -item[1][0], item[0]))
    return tuple(KindSize(kind=kind, source_bytes=old, output_bytes=new) for kind, (old, new) in ordered)


def tensor_kind(name: str) -> str:
    """The part of a block that a tensor belongs to (`self_attn`, `mlp`), `norm`, or what stands alone.

    `model.layers.3.mlp.down_proj.weight_scale` is `mlp`, `model.embed_tokens.weight` is `embed_tokens`.
    """
    *modules, last = name.split(".")
    numbers = [index for index, part in enumerate(modules) if part.isdecimal()]
    inner = modules[numbers[0] + 1 :] if numbers else modules[-1:]
    kind = inner[0] if inner else last
    return "norm" if "norm" in kind else kind
