"""The frozen values that pass between stages; plans and reports are these, written as JSON.

No module imported here loads torch: `vexport --help` and `vexport check` start at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "info"]
Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
# How the KV cache is stored: one fp8 scale for keys and one for values of a layer, or one for each KV head.
KvCache = Literal["fp8", "fp8_per_head"]
# What becomes of layers whose shapes vLLM could not run.
OnMisfit = Literal["refuse", "keep"]
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing a check saw: the place, what was expected, what was found, what to do."""

    check: str
    severity: Severity
    where: str
    expected: str
    got: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}, need {self.expected}; {self.fix} [{self.check}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a safetensors file, known from its header alone.

    `dtype` is safetensors' name (BF16, F8_E4M3, ...); `start` and `end` are absolute byte offsets in `file`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that will be written: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Which part of a stored tensor is a layer's weight, for experts that are stored together.

    The tensor is indexed by `expert` along its first dimension, transposed where `transposed`, and cut to
    the rows `start` to `stop`, taking every `step`-th (2 where gate and up alternate).
    """

    expert: int
    transposed: bool
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """One linear layer to quantize: its name in the output, the stored tensor that holds its weight.

    The weight is (out_features, in_features): the whole tensor, or `part` of it.
    """

    name: str
    weight: str
    out_features: int
    in_features: int
    part: WeightPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGroup:
    """Linear layers that vLLM runs as one parameter and that therefore share scales per tensor.

    `name` is the fused module's name in vLLM (`model.layers.0.self_attn.qkv_proj`); a group of one
    member carries that member's name.
    """

    name: str
    scheme: str
    observer: str
    members: tuple[LinearPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """An attention layer that gets scales for the KV cache: its module's name in the checkpoint.

    `heads` is how many KV heads have scales of their own, None where one serves them all.
    """

    name: str
    heads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be done to a checkpoint, from headers, rules and architecture alone.

    `ignore` says in vLLM's terms what stays unquantized; `notes` are warnings about what was assumed or kept.
    `attention` has the layers that get scales for the KV cache; none where `kv_cache` is None.
    """

    source: str
    architecture: str
    groups: tuple[FusionGroup, ...]
    kept: tuple[str, ...]
    kept_linears: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    parameters: int
    ignore: tuple[str, ...] = ()
    refusals: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    kv_cache: KvCache | None = None
    attention: tuple[AttentionLayer, ...] = ()

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes in use, in order of first use."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """Smallest and largest input value of a layer over `tokens` tokens."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRanges:
    """Smallest and largest value of each KV head of an attention layer's key or value states.

    What is shared by all heads is the smallest of `low` and the largest of `high`.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueRanges:
    """What an attention layer would write to the KV cache: keys after rotary embedding, and values."""

    key: HeadRanges
    value: HeadRanges
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Input ranges by layer, and what a search by importance needs.

    `rows` are the line numbers used (from 1), `digest` is the SHA-256 of their token ids, `tokens` their
    number: a layer that saw fewer (an expert) was not reached by all. `importance` is the mean of x^2 per
    input channel by layer, float32 little-endian in base64, for the layers whose weights are searched by it.
    `kv_ranges` goes by the attention module's name in the checkpoint (`model.layers.0.self_attn`). `routed`
    has, by the name of a module of experts (`model.layers.0.mlp.experts`), how many tokens the router sent
    to each expert, whatever the experts' statistics saw.
    """

    rows: tuple[int, ...]
    digest: str
    tokens: int
    ranges: Mapping[str, InputRange]
    importance: Mapping[str, str] = field(default_factory=dict)
    kv_ranges: Mapping[str, KeyValueRanges] = field(default_factory=dict)
    routed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """How many calibration tokens the router of one layer sent to its experts: fewest, median and most.

    `none` are the experts that it sent none: of their inputs calibration knows only what they would do
    with other experts' tokens, or nothing.
    """

    name: str
    experts: int
    fewest: int
    median: float
    most: int
    none: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The findings on one checkpoint; `ok` means that none of them is an error."""

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What ran the model: versions, platform, kernels by layer kind, and what this platform cannot show."""

    vllm: str
    torch: str
    transformers: str
    platform: str
    processor: str
    dtype: str
    multiprocess: bool
    emulated: bool
    kernels: tuple[str, ...]
    blind_spots: tuple[str, ...]
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A greedy continuation of a fixed prompt."""

    prompt: str
    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobAgreement:
    """Full-vocabulary log-probabilities of vLLM against a reference on the same tokens.

    `mean_kl` and `max_kl` are KL(reference || vLLM) in nats per token position; `limit` bounds `mean_kl`.
    """

    reference: str
    prompts: int
    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What the real engine did with a checkpoint."""

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    engine: EngineInfo | None = None
    canaries: tuple[Canary, ...] = ()
    logprobs: LogprobAgreement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model's mean score on one task, with a two-sided 1 - 2*alpha interval.

    Wilson's interval where each document is right or wrong, else a bootstrap in the metric's own units.
    """

    task: str
    metric: str
    filter: str
    documents: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A document whose correctness changed, with both answers."""

    doc_id: int
    prompt: str
    target: str
    baseline: str
    candidate: str
    direction: Literal["right to wrong", "wrong to right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A difference that is shown beside a gate and decides nothing.

    `baseline` and `candidate` are means; `difference` is positive where the candidate is better, with
    one-sided 1 - alpha bounds; `outcome` is what they would say as a gate.
    """

    task: str
    metric: str
    filter: str
    documents: int
    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """The comparison on one task, or on a group of tasks that lm-eval aggregates.

    `difference` is candidate minus baseline, negative where the candidate is worse; (`low`, `high`) are the
    one-sided bounds that decide: `low` at 1 - alpha, `high` at 1 - alpha or, with several tasks, at the
    level of Holm's step. `recovery` is candidate / baseline, None where the baseline scores 0.
    `documents_needed` would settle an INCONCLUSIVE; None where no number would, or nothing is open.
    Where the metric is not 0/1, right to wrong counts the documents that got worse and `mcnemar_p` is of a
    permutation test. What only paired documents show is None where the samples are missing;
    `changed_wrong` also where the baseline's answers are. `clusters` counts the tasks of a group whose
    documents hang together, None where documents count on their own. `also` has the task's other metrics
    and filters, and a group's tasks.
    """

    task: str
    metric: str
    filter: str
    outcome: Outcome
    documents: int
    baseline: Score
    candidate: Score
    difference: float
    low: float
    high: float
    right_to_wrong: int | None
    wrong_to_right: int | None
    changed_wrong: int | None
    flip_rate: float | None
    flip_low: float | None
    flip_high: float | None
    mcnemar_p: float | None
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    documents_needed: int | None
    flips: tuple[Flip, ...]
    clusters: int | None = None
    also: tuple[Comparison, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer for all tasks, with the sentence that justifies it.

    `pooled` takes all documents as one task, None where there is one task or a metric is not 0/1.
    `warnings` say what weakens the answer: samples that are missing, an environment that changed.
    """

    outcome: Outcome
    reason: str
    margin: float
    alpha: float
    method: str
    tasks: tuple[TaskVerdict, ...]
    pooled: Comparison | None = None
    warnings: tuple[str, ...] = ()


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
class Report:
    """Everything a run found; every other report format is made from this."""

    schema_version: Literal[1] = 1
    name: str
    vexport: str
    created: str
    command: str
    source: str
    baseline: str
    outcome: Outcome
    reason: str
    plan: Plan
    layers: tuple[LayerError, ...]
    calibration_rows: int
    calibration_digest: str | None
    experts: tuple[ExpertCoverage, ...] = ()
    check: CheckReport
    baseline_load: LoadReport
    load: LoadReport
    verdict: Verdict | None
    seconds: Mapping[str, float] = field(default_factory=dict)


CellStatus = Literal["loads", "other precision", "faulty", "refused", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """What vLLM does with a checkpoint, or one kind of its layers, on `tp` devices of capability `sm`.

    `sm` is 90 for SM 9.0. "faulty" loads, but wrongly; "other precision" loads and multiplies otherwise than
    stored; "not shown" needs a real device. `precision` is bits of weight and activation (W8A16), `kernel`
    vLLM's class, `reason` vLLM's own words where it refuses.
    """

    tp: int
    sm: int
    status: CellStatus
    precision: str = ""
    kernel: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One kind of layer (`model.layers.*.mlp.down_proj`), how many there are, how they are stored."""

    name: str
    count: int
    scheme: str
    stored: str
    cells: tuple[MatrixCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLoadReport:
    """What vLLM's model class and loaders do with a checkpoint's headers, for every tp and sm asked for.

    `cells` are the columns for the whole checkpoint, `rows` those for each kind of layer, in the same order;
    there are no rows where no cell was loaded.
    """

    checkpoint: str
    ok: bool
    findings: tuple[Finding, ...]
    vllm: str
    cells: tuple[MatrixCell, ...]
    rows: tuple[MatrixRow, ...]
    blind_spots: tuple[str, ...]
