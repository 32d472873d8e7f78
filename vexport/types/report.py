"""Everything that a run found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vexport.types.accuracy import Verdict
from vexport.types.calibration import ExpertCoverage
from vexport.types.findings import CheckReport
from vexport.types.loading import DryLoadReport, LoadReport
from vexport.types.plan import Plan
from vexport.types.rounding import RoundingReport
from vexport.types.sensitivity import MixedScheme, Sensitivity
from vexport.types.signals import Attribution, Drift
from vexport.types.values import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Weight error of one linear layer: signal-to-noise of the stored weight against the source, in dB."""

    name: str
    scheme: str
    snr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """The weight errors of a checkpoint, in plan order."""

    layers: tuple[LayerError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSize:
    """Bytes of all tensors of one kind (`mlp`, `embed_tokens`) in the source and in the checkpoint."""

    kind: str
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a run found; every other report format is made from this.

    `source_name` is what the source is called: its id on the hub where that is known, else its folder;
    `source_revision` is the commit on the hub that was read.
    """

    schema_version: Literal[1] = 1
    name: str
    vexport: str
    created: str
    command: str
    source: str
    source_name: str = ""
    source_revision: str | None = None
    source_card: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    baseline: str
    outcome: Outcome
    reason: str
    plan: Plan
    sizes: tuple[KindSize, ...] = ()
    layers: tuple[LayerError, ...]
    calibration_rows: int
    calibration_data: str = ""
    calibration_digest: str | None
    experts: tuple[ExpertCoverage, ...] = ()
    rounding: RoundingReport | None = None
    check: CheckReport
    dry_load: DryLoadReport | None = None
    baseline_load: LoadReport
    load: LoadReport
    verdict: Verdict | None
    sensitivity: Sensitivity | None = None
    mixed: MixedScheme | None = None
    drift: Drift | None = None
    attribution: Attribution | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
