"""The frozen values that pass between stages; plans and reports are these, written as JSON.

No module imported here loads torch: `vexport --help` and `vexport check` start at once.
"""

from vexport.types.accuracy import (
    GENERATION_KEYS,
    Attribution,
    BatchSize,
    Cause,
    Comparison,
    Distance,
    Drift,
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
from vexport.types.calibration import (
    Calibration,
    CalibrationData,
    ExpertCoverage,
    HeadRanges,
    InputRange,
    KeyValueRanges,
    Smoothing,
)
from vexport.types.findings import (
    ENGINE_CHECK,
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
    SequenceMemory,
    Severity,
    device_words,
)
from vexport.types.plan import (
    AttentionLayer,
    FusionGroup,
    KvCache,
    LinearPlan,
    OnUnsupportedShape,
    Plan,
    SchemeOutlook,
    SchemeTable,
    TensorInfo,
    TensorSpec,
    WeightPart,
)
from vexport.types.report import (
    BudgetKind,
    Choice,
    ComparedRun,
    GroupSensitivity,
    KindSize,
    LayerError,
    LayerErrors,
    MixedScheme,
    Quantized,
    Report,
    SchemeLoss,
    Sensitivity,
)
from vexport.types.values import PROGRESS_DETAIL, Json, OnProgress, Outcome, named, silent
