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
from vexport.types.tensors import TensorInfo, TensorSpec, WeightPart
from vexport.types.values import Json

__all__ = [
    "AttentionLayer",
    "Calibration",
    "Canary",
    "CellStatus",
    "CheckReport",
    "Comparison",
    "DryLoadReport",
    "EngineInfo",
    "ExpertCoverage",
    "Finding",
    "Flip",
    "FusionGroup",
    "HeadRanges",
    "InputRange",
    "Json",
    "KeyValueRanges",
    "KvCache",
    "LayerError",
    "LayerErrors",
    "LinearPlan",
    "LoadReport",
    "LogprobAgreement",
    "MatrixCell",
    "MatrixRow",
    "OnMisfit",
    "Outcome",
    "Plan",
    "Report",
    "Score",
    "Severity",
    "TaskVerdict",
    "TensorInfo",
    "TensorSpec",
    "Verdict",
    "WeightPart",
]
