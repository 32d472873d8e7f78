"""The frozen values that pass between stages; plans and reports are these, written as JSON.

No module imported here loads torch: `vexport --help` and `vexport check` start at once.
"""

from vexport.types.accuracy import Comparison, Flip, Look, Score, TaskVerdict, Verdict
from vexport.types.calibration import Calibration, ExpertCoverage, HeadRanges, InputRange, KeyValueRanges
from vexport.types.findings import CheckReport, Finding, Severity
from vexport.types.loading import (
    ENGINE_CHECK,
    Canary,
    CellStatus,
    DryLoadReport,
    EngineInfo,
    EngineMode,
    LoadReport,
    LogprobAgreement,
    MatrixCell,
    MatrixRow,
    device_words,
)
from vexport.types.outlook import Estimate, KeptShare, Outlook, SchemeOutlook, SchemeTable
from vexport.types.plan import AttentionLayer, FusionGroup, KvCache, LinearPlan, OnUnsupportedShape, Plan
from vexport.types.prompting import GENERATION_KEYS, BatchSize, GenKwargs, LmEvalSettings, Prompting, Scalar
from vexport.types.quantized import Quantized
from vexport.types.report import KindSize, LayerError, LayerErrors, Report
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
from vexport.types.signals import Attribution, Cause, Distance, Drift, PromptDrift, SchemePoint, TokenDrift
from vexport.types.tensors import TensorInfo, TensorSpec, WeightPart
from vexport.types.values import PROGRESS_DETAIL, Json, OnProgress, Outcome, silent

__all__ = [
    "Estimate",
    "KeptShare",
    "Outlook",
    "SchemeOutlook",
    "SchemeTable",
    "ENGINE_CHECK",
    "GENERATION_KEYS",
    "PROGRESS_DETAIL",
    "Attempt",
    "AttentionLayer",
    "Attribution",
    "BatchSize",
    "BudgetKind",
    "Calibration",
    "Canary",
    "CellStatus",
    "CheckReport",
    "Choice",
    "Comparison",
    "Distance",
    "Drift",
    "DryLoadReport",
    "EngineInfo",
    "EngineMode",
    "ExpertCoverage",
    "Cause",
    "Finding",
    "Flip",
    "FusionGroup",
    "GenKwargs",
    "GroupSensitivity",
    "HeadRanges",
    "InputRange",
    "Json",
    "KeyValueRanges",
    "KindSize",
    "KvCache",
    "LayerError",
    "LayerErrors",
    "LayerLoss",
    "LinearPlan",
    "LmEvalSettings",
    "LoadReport",
    "LogprobAgreement",
    "Look",
    "MatrixCell",
    "MatrixRow",
    "Method",
    "MixedScheme",
    "OnProgress",
    "OnUnsupportedShape",
    "Outcome",
    "Plan",
    "Promotion",
    "Quantized",
    "PromptDrift",
    "Prompting",
    "Report",
    "SchemePoint",
    "Scalar",
    "SchemeLoss",
    "Score",
    "Sensitivity",
    "Severity",
    "TaskVerdict",
    "TensorInfo",
    "TensorSpec",
    "TokenDrift",
    "Tradeoff",
    "Verdict",
    "WeightPart",
    "device_words",
    "silent",
]
