"""Settings of lm-eval, the comparison of two models' answers and log-probabilities, and the
verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vexport.records.values import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDrift:
    """One token of a prompt under both models, in nats: KL(baseline || candidate) over the whole
    vocabulary where it was to be predicted, and what the token itself cost each model.
    """

    token: str
    kl: float
    baseline_nll: float
    candidate_nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDrift:
    """One prompt: means over its tokens but the first, in nats, and the tokens themselves."""

    prompt: str
    kl: float
    baseline_nll: float
    candidate_nll: float
    tokens: tuple[TokenDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Baseline against candidate, both in vLLM, on the same tokens; means over `positions`, in
    nats.

    Beyond `kl_limit` of `mean_kl`, or `nll_limit` of the rise of the mean NLL, it is a warning and
    never decides. `top1_agreement` is the share of positions with the same likeliest token. `worst`
    are the prompts of largest KL, the worst first. Drifts can be compared where `digest`, of the
    token ids, is the same.
    """

    prompts: int
    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    baseline_nll: float
    candidate_nll: float
    kl_limit: float
    nll_limit: float
    worst: tuple[PromptDrift, ...]
    digest: str = ""

    @property
    def nll_rise(self) -> float:
        """Return the candidate's NLL minus the baseline's."""
        return self.candidate_nll - self.baseline_nll

    @property
    def is_kl_high(self) -> bool:
        """Return whether the mean KL is above its limit."""
        return self.mean_kl > self.kl_limit

    @property
    def is_nll_high(self) -> bool:
        """Return whether the rise of the NLL is above its limit."""
        return self.nll_rise > self.nll_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Mean and largest KL(`reference` || `measured`) in nats per token; `limit` bounds the mean."""

    reference: str
    measured: str
    mean_kl: float
    max_kl: float
    limit: float


Cause = Literal["none", "quantization", "loader", "kernel", "harness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The same tokens scored four ways, and the cause of a loss (`guilty` in JSON).

    (1) transformers and (2) vLLM on the baseline; (3) transformers with the exported weights
    dequantized and
    activations rounded, (4) vLLM on the candidate. `noise` is 2 against 1, `quantization` 3 against
    1,
    `engine` 4 against 3, `total` 4 against 2, None where the models do not read the same tokens.
    `harness`
    has other differences between the questions, `evidence` what speaks for the loader, in vLLM's
    words.
    """

    cause: Cause = field(metadata={"alias": "guilty"})
    reason: str
    noise: Distance | None
    quantization: Distance | None
    engine: Distance | None
    total: Distance | None
    harness: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


BatchSize = int | Literal["auto"]
Scalar = bool | int | float | str | None
GenKwargs = Mapping[str, Scalar | list[Scalar] | dict[str, Scalar]]
GENERATION_KEYS = (
    *(
        "do_sample",
        "until",
        "max_gen_toks",
        "max_new_tokens",
        "max_tokens",
        "max_completion_tokens",
    ),
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *(
        "frequency_penalty",
        "min_tokens",
        "ignore_eos",
        "stop",
        "stop_token_ids",
        "bad_words",
        "logit_bias",
    ),
    *(
        "allowed_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "thinking_token_budget",
    ),
)
"""Keys of `gen_kwargs`: those that lm-eval reads (`normalize_gen_kwargs`), and the usual fields of
vLLM's SamplingParams, which gets the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalSettings:
    """The arguments of lm-eval's `simple_evaluate` and its vLLM model, under their names (0.4.13).

    `apply_chat_template` is a template's name or true for the default one; with `plain_as_is` tasks
    that score the log-likelihood of plain text get none. `fewshot_as_multiturn` counts only with a
    template. `num_fewshot` does not change a task that sets 0 itself. `gen_kwargs` replace those of
    generating tasks, key by key; `max_gen_toks` is the most new tokens where the task sets none. An
    answer begins behind the last `think_end_token`; `enable_thinking` is handed to the template.
    `batch_size` is how many requests vLLM is given at once. Generating tasks are asked with `seeds`
    seeds.
    """

    num_fewshot: int | None = None
    apply_chat_template: bool | str = False
    plain_as_is: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    gen_kwargs: GenKwargs = field(default_factory=dict)
    max_gen_toks: int | None = None
    think_end_token: str | None = None
    enable_thinking: bool | None = None
    batch_size: BatchSize = "auto"
    seeds: int = 1


DEFAULT_CONCURRENCY = 32
REQUEST_SECONDS = 300.0
"""Of one answer of a server, and of trying again where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a server's OpenAI API, as `http://HOST:PORT/v1`, and how it is asked.

    `model` is needed where it serves several. `concurrency` requests are under way at a time; one
    that takes longer than `request_timeout` seconds, or fails in a way that may pass, is tried
    again for at most `retry_seconds`.
    """

    url: str
    model: str | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    request_timeout: float = REQUEST_SECONDS
    retry_seconds: float = REQUEST_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """The prompts behind the results of a verdict, as lm-eval recorded them.

    `chat_template` and `system_instruction` are SHA-256, shortened to 16 digits; None where there
    was none. `generation` has `gen_kwargs`, and of the model's arguments those that change an
    answer. `untemplated` are tasks that the template was not applied to.
    """

    chat_template: str | None
    system_instruction: str | None
    num_fewshot: Mapping[str, int]
    fewshot_as_multiturn: bool
    generation: Mapping[str, str]
    untemplated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model's mean score on one task, with a two-sided 1 - 2*alpha interval.

    Wilson's interval where each document is right or wrong, else a bootstrap in the metric's own
    units.
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


Unit = Literal["share", "nats", "metric"]
"""The unit of a metric's values: a share of one, nats (a log-likelihood), or the metric's own
units.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A difference of two means that is shown next to a gate and decides nothing.

    It is positive where the candidate is better, with one-sided 1 - alpha bounds. `outcome`
    compares these bounds with the margin; it is INCONCLUSIVE for metrics that no margin applies to.
    `higher_is_better` describes the values of single documents. `unit` is None in reports of older
    versions.
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
    unit: Unit | None = None
    higher_is_better: bool = True

    @property
    def in_shares(self) -> bool:
        """Return whether the scores are shares, whose differences are points."""
        return _in_shares(self.unit, self.baseline, self.candidate)


def _in_shares(unit: Unit | None, baseline: float, candidate: float) -> bool:
    """Read the unit; guess from both means in reports of older versions."""
    if unit is not None:
        return unit == "share"
    return min(baseline, candidate) >= 0 and max(baseline, candidate) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """Generated answers of one model that did not score, by how they ended.

    `cut` answers ended at their longest length, `empty` ones have no text, and in `unparsed` ones
    the task's filter found no answer. `lost` of these do not count as answers. `thinking` answers,
    right or wrong, never ended their thinking.
    """

    answers: int
    cut: int
    empty: int
    unparsed: int
    lost: int
    thinking: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """The comparison on one task, or on a group of tasks that lm-eval aggregates.

    `difference` is candidate minus baseline, negative where the candidate is worse; (`low`, `high`)
    are the one-sided bounds that decide: `low` at 1 - alpha, `high` at 1 - alpha or, with several
    tasks, at the level of Holm's step. `recovery` is candidate / baseline, None where the baseline
    scores 0. `documents_needed` would settle an INCONCLUSIVE; None where no number would, or
    nothing is open. `seeds` answers were sampled for each document, and `seeds_needed` of these
    documents would do as well. `uninformative` says why the task shows nothing, empty where it
    does: the baseline does no better than chance, so that no answer of the candidate is a pass.
    Where the metric is not 0/1, right to wrong counts the documents that got worse and `mcnemar_p`
    is of a permutation test. `changed_wrong` is None where the baseline's answers were not kept.
    `clusters` counts the tasks of a group whose documents are clustered, None where documents count
    on their own. `also` has the task's other metrics and filters, and a group's tasks. `unit` and
    `higher_is_better` are those of the scores; `unit` is None in reports of older versions.
    `baseline_answers` and `candidate_answers` count generated answers, None if nothing was
    generated or nothing was kept. `lost_answers` describes lost ones from 1 % on either side; with
    `too_many_lost`, more than the margin, there is no PASS.
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
    right_to_wrong: int
    wrong_to_right: int
    changed_wrong: int | None
    flip_rate: float
    flip_low: float
    flip_high: float
    mcnemar_p: float
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    documents_needed: int | None
    flips: tuple[Flip, ...]
    uninformative: str = ""
    clusters: int | None = None
    seeds: int = 1
    seeds_needed: int | None = None
    also: tuple[Comparison, ...] = ()
    unit: Unit | None = None
    higher_is_better: bool = True
    baseline_answers: AnswerCounts | None = None
    candidate_answers: AnswerCounts | None = None
    lost_answers: str = ""
    too_many_lost: bool = False

    @property
    def in_shares(self) -> bool:
        """Return whether the scores are shares, whose differences are points."""
        return _in_shares(self.unit, self.baseline.value, self.candidate.value)


TextMeasure = Literal[
    "KL to the baseline",
    "lower bound of the KL to the baseline",
    "rise of the NLL",
    "fall of the acceptance length",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """vLLM's counters of speculative decoding (`vllm:spec_decode_num_*`) for one prompt."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    def __sub__(self, earlier: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceLengths:
    """Tokens that a step of speculative decoding yields: 1 + accepted tokens / drafts over all
    prompts.

    `draft_tokens` is the mean length of both models' drafts.
    """

    method: str
    draft_tokens: tuple[float, float]
    baseline: float
    candidate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimit:
    """One measure of held-out text against its limit, in nats a token; of the acceptance length as
    a share.

    (`low`, `high`) are the bounds that decide: `high` at 1 - alpha, `low` at 1 - alpha / 2, since
    either of two measures may fail (/ 3 with drafts); None of one row. `rows_needed` would settle
    an INCONCLUSIVE, None where no number would.
    """

    measure: TextMeasure
    value: float
    low: float | None
    high: float | None
    limit: float
    outcome: Outcome
    rows_needed: int | None = None

    @property
    def is_share(self) -> bool:
        """Return whether its numbers are shares, not nats a token."""
        return self.measure == "fall of the acceptance length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVerdict:
    """Both models' log-probabilities of held-out text, where that decides instead of tasks.

    The NLLs are means over `tokens`, and `top1_agreement` is the share of them with the same
    likeliest token (two-sided 1 - 2*alpha interval over rows); the KL is over the `positions` whose
    whole vocabulary was compared, the first of each row. `limits` is empty where the text is too
    short to decide. `acceptance` is that of drafts which continue the rows, None where nothing
    drafts.
    """

    data: str
    digest: str
    rows: int
    tokens: int
    positions: int
    baseline_nll: float
    candidate_nll: float
    top1_agreement: float
    top1_low: float | None
    top1_high: float | None
    limits: tuple[TextLimit, ...]
    acceptance: AcceptanceLengths | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer for all tasks, with the sentence that justifies it.

    `pooled` takes all documents as one task, None where there is one task or a metric is not 0/1.
    `warnings` say what weakens the answer: samples that are missing, an environment that changed.
    `prompting` is None in reports that are older than it. `drift` and `attribution` are those of
    `vexport eval`; a run has its own in its report. `checkpoint` is the candidate as it was given
    to `vexport eval`. `device` ran it (`CPU, emulated`), or is its server's address; empty where
    its results do not tell. `text` decides where there are no tasks: `margin` is then the limit of
    the NLL.
    """

    schema: Literal["vexport.verdict/1"] = "vexport.verdict/1"
    outcome: Outcome
    reason: str
    margin: float
    alpha: float
    method: str
    tasks: tuple[TaskVerdict, ...]
    checkpoint: str = ""
    device: str = ""
    pooled: Comparison | None = None
    warnings: tuple[str, ...] = ()
    prompting: Prompting | None = None
    drift: Drift | None = None
    attribution: Attribution | None = None
    text: TextVerdict | None = None

    @property
    def worst_task(self) -> TaskVerdict | None:
        """Return the task with the lowest bound; None without tasks."""
        return min(self.tasks, key=lambda task: task.low, default=None)
