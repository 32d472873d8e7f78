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
from vexport.records.gates import ignored_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a checkpoint that the run made.

    `id` is the source's id on the hub if it is known, else the name of its folder. `revision` is
    the commit on the hub that was read, empty for a folder. `card` is the front matter of the
    source's model card that the checkpoint inherits.
    """

    name: str
    id: str = ""
    revision: str = ""
    card: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSummary:
    """The calibration of a checkpoint: its number of rows, its data, and the digest of the rows."""

    rows: int
    data: str
    digest: str
    experts: tuple[ExpertCoverage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCheckpoint:
    """A checkpoint that the run made. It has the facts of a GivenCheckpoint, and more."""

    source: Source
    plan: Plan
    sizes: tuple[KindSize, ...]
    layers: tuple[LayerError, ...]
    check: CheckReport
    dry_load: DryLoadReport | None = None
    calibration: CalibrationSummary | None = None
    rounding: RoundingReport | None = None
    sensitivity: GroupSensitivities | None = None
    mixed: MixedScheme | None = None

    @property
    def name(self) -> str:
        """The name of the model that was quantized."""
        return self.source.id or self.source.name

    @property
    def scheme_names(self) -> str:
        return self.plan.scheme_names

    @property
    def format(self) -> str:
        return ""

    @property
    def num_bytes(self) -> int:
        return self.plan.output_bytes

    @property
    def source_bytes(self) -> int:
        return self.plan.source_bytes

    @property
    def parameters(self) -> int:
        return self.plan.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The model that the checkpoint was compared with.

    `load` is None if the model did not run on this machine.
    """

    name: str
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call that made a report: version of vexport, time, command line, and time by stage."""

    vexport: str
    created: str
    command: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a run, from which all formats of the report are made.

    Either the run made the checkpoint (`made`), or the user gave it (`given`: `vexport eval`,
    `vexport load --run-dir`). The other sections are absent if their stage did not run. `variants`
    are the results with different settings and versions of vLLM.
    """

    schema: Literal["vexport.report/1"] = "vexport.report/1"
    name: str
    outcome: Outcome
    reason: str
    call: Call
    made: MadeCheckpoint | None = None
    given: GivenCheckpoint | None = None
    baseline: Baseline | None = None
    load: LoadReport | None = None
    verdict: Verdict | None = None
    drift: Drift | None = None
    attribution: Attribution | None = None
    variants: tuple[ComparedVariant, ...] = ()

    @property
    def checkpoint(self) -> MadeCheckpoint | GivenCheckpoint:
        """The checkpoint that the report is about."""
        checkpoint = self.made or self.given
        assert checkpoint is not None
        return checkpoint

    @property
    def baseline_name(self) -> str:
        """The name of the baseline, or "" without a baseline."""
        return self.baseline.name if self.baseline is not None else ""

    @property
    def is_of_variants(self) -> bool:
        """Return True if the report only compares variants of a given checkpoint."""
        return self.given is not None and self.verdict is None and bool(self.variants)

    @property
    def loads(self) -> bool:
        """Return False if the check or a load found a fault of the checkpoint."""
        of_made = (self.made.check, self.made.dry_load) if self.made else ()
        return all(stage is None or stage.ok for stage in (*of_made, self.load))

    @property
    def ignored(self) -> str:
        """The number of findings of ignored rules, and the rules: see `ignored_counts`."""
        return ignored_counts(self.made.check) if self.made else ""

    @property
    def device(self) -> str:
        """The device or server that ran the checkpoint, or "" if nothing ran it."""
        if self.verdict is not None and "://" in self.verdict.device:
            return self.verdict.device
        return self.load.engine.device if self.load and self.load.engine else ""
