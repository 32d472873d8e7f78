"""Report of a run, as it is written to report.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vexport.formats.plan import Plan
from vexport.records import (
    Attribution,
    CheckReport,
    ComparedVariant,
    Drift,
    DryLoadReport,
    ExpertCoverage,
    GivenCheckpoint,
    GroupSensitivities,
    KindSize,
    LayerError,
    LoadReport,
    MixedScheme,
    Outcome,
    Verdict,
)
from vexport.records.calibration import RoundingReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a run, from which all formats of the report are made.

    `source_name` is the source's id on the hub if it is known, else its folder. `source_revision`
    is the commit on the hub that was read.

    If the user gave the checkpoint (`vexport eval`, `vexport load --run-dir`), `given` describes
    it, and `source`, `plan` and `check` are None. `baseline` is None if the checkpoint was not
    compared with a baseline. `baseline_load` and `load` are None if the model did not run on this
    machine. `variants` are the results with different settings and versions of vLLM.
    """

    schema: Literal["vexport.report/1"] = "vexport.report/1"
    name: str
    vexport: str
    created: str
    command: str
    source: str | None
    source_name: str = ""
    source_revision: str | None = None
    source_card: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    baseline: str | None
    outcome: Outcome
    reason: str
    plan: Plan | None
    given: GivenCheckpoint | None = None
    sizes: tuple[KindSize, ...] = ()
    layers: tuple[LayerError, ...]
    calibration_rows: int
    calibration_data: str = ""
    calibration_digest: str | None
    experts: tuple[ExpertCoverage, ...] = ()
    rounding: RoundingReport | None = None
    check: CheckReport | None
    dry_load: DryLoadReport | None = None
    baseline_load: LoadReport | None
    load: LoadReport | None
    verdict: Verdict | None
    sensitivity: GroupSensitivities | None = None
    mixed: MixedScheme | None = None
    drift: Drift | None = None
    attribution: Attribution | None = None
    variants: tuple[ComparedVariant, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_of_variants(self) -> bool:
        """Return True if the report only compares variants of a given checkpoint."""
        return self.given is not None and self.verdict is None and bool(self.variants)
