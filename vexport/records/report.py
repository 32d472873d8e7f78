"""Records of a run's report, of comparisons of runs, of `quantize`, and of measured losses."""

from dataclasses import dataclass
from typing import Literal

from vexport.records.accuracy import TaskVerdict, Verdict
from vexport.records.calibration import ExpertCoverage, Rounding, RoundingReport
from vexport.records.findings import Finding
from vexport.records.values import Outcome

# Unit of a mixed scheme's budget: bits per weight, bytes, or a share of the source's bytes.
BudgetKind = Literal["bits", "bytes", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeLoss:
    """Cost of quantizing a single group with a scheme. All other layers stay as in the source.

    `num_bytes` is the size of the group's tensors. `loss` is the mean KL(source || quantized) in
    nats per token.
    """

    scheme: str
    observer: str
    num_bytes: int
    loss: float
    rounding: Rounding = "nearest"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivity:
    """Linear layers that vLLM needs in the same scheme: a fused layer, or all routed experts of a
    layer.

    `name` is as in FusionGroup. For routed experts it is the name of their module
    (`model.layers.0.mlp.experts`). `refused` lists the schemes that vLLM cannot run for this group,
    with reasons.
    """

    name: str
    layers: tuple[str, ...]
    parameters: int
    source_bytes: int
    schemes: tuple[SchemeLoss, ...]
    refused: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivities:
    """Losses of all groups, on `samples` calibration rows with `tokens` tokens in total."""

    samples: int
    tokens: int
    groups: tuple[GroupSensitivity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """Scheme chosen for a group, the group's bytes, and the loss in nats per token.

    The scheme `keep` leaves the group as it is in the source.
    """

    name: str
    scheme: str
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedScheme:
    """Schemes that `scheme: auto` chose within its budget.

    `loss` is the sum of the losses of all choices. It is a prediction.
    """

    budget: BudgetKind
    limit: float
    candidates: tuple[str, ...]
    output_bytes: int
    loss: float
    choices: tuple[SchemeChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Weight error of a linear layer.

    `snr_db` is the signal-to-noise ratio of the stored weight against the source's weight, in dB.
    """

    name: str
    scheme: str
    snr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """Weight errors of a checkpoint's layers, in plan order."""

    layers: tuple[LayerError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSize:
    """Bytes of all tensors of a kind (`mlp`, `embed_tokens`), in the source and the checkpoint."""

    kind: str
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCheckpoint:
    """A checkpoint that the user gave to a run, instead of a checkpoint that the run made.

    `name` is the folder, hub name or address in the command. `schemes` are the names of the schemes
    of a compressed-tensors checkpoint. `format` is the name of the storage format, empty if it is
    unknown or the checkpoint is not quantized. The sizes are None if the files are not on this
    machine. `source_bytes` and `parameters` are the baseline's.
    """

    name: str
    schemes: tuple[str, ...] = ()
    format: str = ""
    num_bytes: int | None = None
    source_bytes: int | None = None
    parameters: int | None = None

    @property
    def scheme_names(self) -> str:
        return ", ".join(self.schemes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A row of `vexport compare`, or of `vexport report` with several runs.

    `folder` is the run directory. `outcome` is None if the run has no result; `reason` is then the
    cause. `mean_kl` is in nats per token. `worst` is the task with the lowest bound, without its
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


# Result of a variant. BASELINE: the first variant, the baseline of all comparisons. REFUSED:
# vLLM does not accept the setting. NO ANSWER: the environment failed (a crash of the engine).
VariantOutcome = Literal["BASELINE", "PASS", "FAIL", "INCONCLUSIVE", "REFUSED", "NO ANSWER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVariant:
    """A row of `vexport compare --serve`: a checkpoint in one setting and one version of vLLM.

    `setting` has the arguments of vLLM, such as `kv_cache_dtype=fp8`, or `default`. `vllm` is the
    version of vLLM, and `vllm_python` the interpreter, empty for vexport's interpreter. `folder`
    has the variant's responses and vLLM's log. `reason` is the reason of the outcome. `mean_kl` is
    the divergence from the baseline in nats per token, None if it was not measured. `worst` is the
    task with the lowest bound. `verdict` compares all tasks, or the text, with the baseline. Both
    have no documents.
    """

    schema: Literal["vexport.compare-serve/1"] = "vexport.compare-serve/1"
    setting: str
    vllm: str = ""
    vllm_python: str = ""
    folder: str = ""
    outcome: VariantOutcome
    reason: str = ""
    mean_kl: float | None = None
    worst: TaskVerdict | None = None
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        """Name of the variant in sentences: its setting.

        The version of vLLM is added if vLLM runs in another interpreter than vexport's.
        """
        return f"{self.setting} with vLLM {self.vllm}" if self.vllm_python else self.setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A written checkpoint: its contents, and the commands to run next.

    `layers` is the number of quantized layers among `of_layers` linear layers.
    `quantized_parameters` is the number of quantized parameters among `parameters`. `smoothing` is
    the smoothing strength, and `smoothed_tensors` is the number of scaled tensors.
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
