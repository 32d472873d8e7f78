"""The report of a run, the comparison of several, the answer of `quantize`, and measured losses."""

from dataclasses import dataclass
from typing import Literal

from vexport.records.accuracy import TaskVerdict
from vexport.records.calibration import ExpertCoverage, Rounding, RoundingReport
from vexport.records.findings import Finding
from vexport.records.values import Outcome

# The budget of a mixed scheme: bits per weight, bytes, or share of the source's bytes.
BudgetKind = Literal["bits", "bytes", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeLoss:
    """The cost of one scheme for one group while all else stays as in the source.

    `num_bytes` is what the group's tensors take, `loss` the mean KL(source || quantized) in nats
    per token.
    """

    scheme: str
    observer: str
    num_bytes: int
    loss: float
    rounding: Rounding = "nearest"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivity:
    """The linear layers that vLLM needs in one scheme: a fused layer, or all routed experts of a
    layer.

    `name` is as in FusionGroup, for routed experts their module (`model.layers.0.mlp.experts`).
    `refused` says which schemes vLLM could not run here, and why.
    """

    name: str
    layers: tuple[str, ...]
    parameters: int
    source_bytes: int
    schemes: tuple[SchemeLoss, ...]
    refused: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivities:
    """The loss of every group, on `samples` calibration rows of `tokens` tokens together."""

    samples: int
    tokens: int
    groups: tuple[GroupSensitivity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """The scheme chosen for a group (`keep` leaves it as it is), its bytes and its loss in nats per
    token.
    """

    name: str
    scheme: str
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedScheme:
    """The schemes that `scheme: auto` chose within its budget.

    `loss` is the sum of the choices' losses, a prediction.
    """

    budget: BudgetKind
    limit: float
    candidates: tuple[str, ...]
    output_bytes: int
    loss: float
    choices: tuple[SchemeChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Weight error of one linear layer: signal-to-noise of the stored weight against the source, in
    dB.
    """

    name: str
    scheme: str
    snr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """The weight errors of a checkpoint, in plan order."""

    layers: tuple[LayerError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSize:
    """Bytes of all tensors of one kind (`mlp`, `embed_tokens`) in the source and in the
    checkpoint.
    """

    kind: str
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A row of `vexport compare`, or of `vexport report` over several runs.

    `folder` is the run directory. `outcome` is None where nothing came of the run, for the
    `reason`. `mean_kl` is in nats a token; `worst` is the task with the lowest bound, without its
    documents. `smallest` marks the smallest checkpoint that passes.
    """

    schema: Literal["vexport.compare/1"] = "vexport.compare/1"
    name: str
    folder: str
    schemes: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    num_bytes: int = 0
    bits_per_weight: float = 0.0
    mean_kl: float | None = None
    worst: TaskVerdict | None = None
    smallest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A checkpoint that was written: what it is made of and what to type next.

    `layers` of `of_layers` linear layers are quantized, `quantized_parameters` of `parameters`.
    `smoothing` is the strength, for which `smoothed_tensors` were scaled.
    """

    schema: Literal["vexport.quantize/1"] = "vexport.quantize/1"
    checkpoint: str
    source: str
    schemes: tuple[str, ...]
    layers: int
    of_layers: int
    quantized_parameters: int
    parameters: int
    source_bytes: int
    output_bytes: int
    bits: float
    calibration_rows: int
    calibration_data: str = ""
    calibration_digest: str | None
    smoothing: float = 0.0
    smoothed_tensors: int = 0
    experts: tuple[ExpertCoverage, ...]
    rounding: RoundingReport | None
    warnings: tuple[str, ...]
    next_commands: tuple[str, ...]
