"""The frozen values that pass between stages; plans and reports are these, written as JSON.

No module imported here loads torch: `vexport --help` and `vexport check` start at once.
"""

from vexport.types.accuracy import Comparison, Flip, Outcome, Score, TaskVerdict, Verdict
from vexport.types.calibration import Calibration, ExpertCoverage, HeadRanges, InputRange, KeyValueRanges
from vexport.types.findings import CheckReport, Finding, Severity
from vexport.types.loading import (
    Canary,
    CellStatus,
    DryLoadReport,
    EngineInfo,
    LoadReport,
    LogprobAgreement,
    MatrixCell,
    MatrixRow,
)
from vexport.types.plan import AttentionLayer, FusionGroup, KvCache, LinearPlan, OnMisfit, Plan
from vexport.types.report import LayerError, LayerErrors, Report
from vexport.types.sensitivity import (
    Attempt,
    BudgetKind,
    Choice,
    GroupSensitivity,
    LayerLoss,
    Method,
    MixedScheme,
    Promotion,
    SchemeLoss,
    Sensitivity,
    Tradeoff,
)
from vexport.types.tensors import TensorInfo, TensorSpec, WeightPart
from vexport.types.values import Json

__all__ = [
    "Attempt",
    "AttentionLayer",
    "BudgetKind",
    "Calibration",
    "Canary",
    "CellStatus",
    "CheckReport",
    "Choice",
    "Comparison",
    "DryLoadReport",
    "EngineInfo",
    "ExpertCoverage",
    "Finding",
    "Flip",
    "FusionGroup",
    "GroupSensitivity",
    "HeadRanges",
    "InputRange",
    "Json",
    "KeyValueRanges",
    "KvCache",
    "LayerError",
    "LayerErrors",
    "LayerLoss",
    "LinearPlan",
    "LoadReport",
    "LogprobAgreement",
    "MatrixCell",
    "MatrixRow",
    "Method",
    "MixedScheme",
    "OnMisfit",
    "Outcome",
    "Plan",
    "Promotion",
    "Report",
    "SchemeLoss",
    "Score",
    "Sensitivity",
    "Severity",
    "TaskVerdict",
    "TensorInfo",
    "TensorSpec",
    "Tradeoff",
    "Verdict",
    "WeightPart",
]
