"""The frozen values that pass between stages; plans and reports are these, written as JSON.

No module imported here loads torch: `vexport --help` and `vexport check` start at once. The values
of an evaluation and of a run are loaded when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vexport.records.calibration import (
    CalibrationData,
    CalibrationRecord,
    ExpertCoverage,
    HeadRanges,
    InputRange,
    KeyValueRanges,
    Smoothing,
)
from vexport.records.findings import (
    ENGINE_CHECK,
    IN_FULL,
    Canary,
    CellStatus,
    CheckReport,
    DryLoadReport,
    EngineInfo,
    EngineMode,
    Finding,
    GpuRoom,
    LoadReport,
    LogprobAgreement,
    MatrixCell,
    MatrixRow,
    NotJudged,
    RankMemory,
    Repair,
    RepairReport,
    SequenceMemory,
    Severity,
    WeightChange,
    device_words,
    without_details,
)
from vexport.records.plan import (
    AttentionLayer,
    FusionGroup,
    GroupSize,
    KvCache,
    LinearPlan,
    OnUnsupportedShape,
    Plan,
    PlanRequest,
    SchemeOutlook,
    SchemeTable,
    TensorInfo,
    TensorSpec,
    WeightPart,
)
from vexport.records.values import PROGRESS_DETAIL, Json, OnProgress, Outcome, named, silent

if TYPE_CHECKING:
    from vexport.records.accuracy import (
        GENERATION_KEYS,
        AcceptanceLengths,
        AnswerCounts,
        Attribution,
        BatchSize,
        Cause,
        Comparison,
        Distance,
        DraftCounts,
        Drift,
        Endpoint,
        Flip,
        GenKwargs,
        LmEvalSettings,
        PromptDrift,
        Prompting,
        Scalar,
        Score,
        TaskVerdict,
        TextLimit,
        TextMeasure,
        TextVerdict,
        TokenDrift,
        Verdict,
    )
    from vexport.records.report import (
        BudgetKind,
        ComparedRun,
        GroupSensitivities,
        GroupSensitivity,
        KindSize,
        LayerError,
        LayerErrors,
        MixedScheme,
        Quantized,
        Report,
        SchemeChoice,
        SchemeLoss,
    )
else:

    def __getattr__(name: str) -> object:
        for module in ("accuracy", "report") if name[0].isupper() else ():
            if hasattr(loaded := import_module(f"{__name__}.{module}"), name):
                return getattr(loaded, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
