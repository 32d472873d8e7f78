"""Records of accuracy evaluations: lm-eval settings, comparisons of two models, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from vexport.records.margin import Unit
from vexport.records.scale import Scale
from vexport.records.values import Outcome, about
from vexport.rules.book import Rule
from vexport.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDrift:
    """Predictions of a prompt's token by both models. All values are in nats.

    `kl` is KL(baseline || candidate) over the whole vocabulary at the position that predicts the
    token. `baseline_nll` and `candidate_nll` are the token's negative log-likelihoods.
    """

    token: str
    kl: float
    baseline_nll: float
    candidate_nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDrift:
    """Tokens of a prompt and the means over them in nats.

    The models do not predict the first token, so the means exclude it.
    """

    prompt: str
    kl: float
    baseline_nll: float
    candidate_nll: float
    tokens: tuple[TokenDrift, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Difference between both models' log-probabilities of the same tokens in vLLM.

    All means are in nats, over `positions`. A warning appears if `mean_kl` is above `kl_limit`, or
    if the mean NLL rises by more than `nll_limit`. Drift never changes the outcome.

    `top1_agreement` is the share of positions at which both models have the same likeliest token.
    `worst` lists the prompts with the largest KL, largest first. `digest` is a digest of the token
    ids: two drifts are comparable if their digests are equal.
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
        """Return True if the mean KL is above its limit."""
        return self.mean_kl > self.kl_limit

    @property
    def is_nll_high(self) -> bool:
        """Return True if the rise of the NLL is above its limit."""
        return self.nll_rise > self.nll_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Mean and largest KL(`reference` || `measured`) in nats per token. The mean has a `limit`."""

    reference: str
    measured: str
    mean_kl: float
    max_kl: float
    limit: float


Cause = Literal["none", "quantization", "loader", "kernel", "harness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Cause of an accuracy loss (`guilty` in JSON), from scoring the same tokens in four ways:

    - (1) transformers on the baseline
    - (2) vLLM on the baseline
    - (3) transformers on the exported weights, dequantized, with rounded activations
    - (4) vLLM on the candidate

    `noise` compares (2) with (1), `quantization` (3) with (1), `engine` (4) with (3), and `total`
    (4) with (2). They are None if the two models read different tokens. `harness` lists differences
    between the two models' prompts. `evidence` lists errors that the static check or vLLM's loaders
    found in the candidate.
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
"""Valid keys of `gen_kwargs`.

lm-eval reads some of them (`normalize_gen_kwargs`) and passes the rest to vLLM's SamplingParams.
The list contains the usual fields of SamplingParams.
"""


DEFAULT_CONCURRENCY = 32
REQUEST_SECONDS = 300.0
"""Time limit for a response of a server, and for retries of a failed request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a server's OpenAI API (`http://HOST:PORT/v1`) and limits for requests to it.

    `model` is required if the server has several models. At most `concurrency` requests run at a
    time. A request is repeated, for at most `retry_seconds`, if it takes longer than
    `request_timeout` seconds or if its error may be temporary.
    """

    url: str
    model: str | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    request_timeout: float = REQUEST_SECONDS
    retry_seconds: float = REQUEST_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """Settings of the prompts behind a verdict, as lm-eval recorded them.

    `chat_template` and `system_instruction` are the first 16 digits of a SHA-256, or None if they
    were not used. `generation` contains `gen_kwargs` and the model's arguments that change
    responses. `untemplated` lists the tasks without the chat template.
    """

    chat_template: str | None
    system_instruction: str | None
    num_fewshot: Mapping[str, int]
    fewshot_as_multiturn: bool
    generation: Mapping[str, str]
    untemplated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with a two-sided 1 - 2*alpha interval.

    The score of a model is the mean over the documents, or the metric's aggregate of them (such as
    a perplexity). Its interval is Wilson's if each document is right or wrong. For other metrics it
    is a bootstrap interval in the metric's units.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A document that only one of the two models solved, with the responses of both."""

    doc_id: int | str
    prompt: str
    target: str
    baseline: str
    candidate: str
    direction: Literal["right to wrong", "wrong to right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of a metric between both models on the same documents.

    - `difference` is candidate minus baseline: negative if the candidate is worse. For perplexities
      it is in nats: the logarithm of the ratio of both perplexities, with a negative sign if the
      perplexity rises.
    - `low` and `high` are the one-sided bounds that decide, both at 1 - alpha. If there are several
      tasks, `high` is at the level of Holm's step instead.
    - `margin` is the acceptable loss in the unit of the difference. If it is relative,
      `relative_margin` is its share of the baseline's value.
    - `higher_is_better` is True if a higher score of a single document is better. For perplexities,
      this score is the document's log-likelihood. `direction_assumed` is True if neither the
      harness nor the user states it.
    """

    task: str
    metric: str
    filter: str
    documents: int
    unit: Unit
    higher_is_better: bool = True
    direction_assumed: bool = False
    difference: float
    low: float
    high: float
    margin: float
    relative_margin: float | None = None
    outcome: Outcome

    @property
    def scale(self) -> Scale:
        """The format of the metric's numbers."""
        return Scale(
            measure=self.unit,
            metric=self.metric,
            margin=self.margin,
            relative_margin=self.relative_margin,
        )

    @property
    def shown(self) -> str:
        """The difference as reports show it: `-0.31` points."""
        return self.scale.change(self.difference)

    @property
    def bounds(self) -> str:
        """The bounds that decide: `-1.30 to +0.10`."""
        return self.scale.changes(self.low, self.high)

    def share_of_margin(self, value: float) -> float:
        """Return a difference as a share of the margin, to compare tasks with different margins.

        If the margin is 0, return the difference itself.
        """
        return value / self.margin if self.margin else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Difference):
    """Difference of a metric for information. It does not change the outcome of a verdict.

    `baseline` and `candidate` are lm-eval's aggregates. `outcome` compares the bounds with the
    margin. It is always INCONCLUSIVE if the metric cannot decide a verdict.
    """

    baseline: float
    candidate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """Numbers of a model's responses, counted by how they ended.

    Only incorrect responses are in `cut`, `empty` and `unparsed`. A `cut` response reached
    the maximum length, an `empty` response has no text, and in an `unparsed` response the task's
    filter found nothing. `lost` is the number of these responses that say nothing about the model's
    ability, for example because they were cut before the answer. `thinking` counts all responses
    that never ended their thinking, whatever their score.
    """

    answers: int
    cut: int
    empty: int
    unparsed: int
    lost: int
    thinking: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How the responses of both models ended.

    A side is None if nothing was generated, or if the endings were not kept.
    """

    baseline: AnswerCounts | None
    candidate: AnswerCounts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Responses that changed between right and wrong.

    - `right_to_wrong` counts the responses that became wrong. If the metric is not 0/1, it counts
      the responses with a worse score.
    - `changed_wrong` counts pairs of two different wrong responses to a document. It is None if the
      baseline's responses were not kept, or if the metric does not score responses as correct or
      wrong.
    - `flip_rate` is the share of all responses that changed.
    - `flips` are documents that only one of the models solved.
    """

    right_to_wrong: int
    wrong_to_right: int
    changed_wrong: int | None
    flip_rate: Estimate
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Numbers that would settle an INCONCLUSIVE outcome.

    - `documents` is the number of documents.
    - `seeds` is the number of sampled responses per document that would settle the outcome without
      more documents. It is None if no number would, or if nothing was sampled.
    - `available` is the number of documents in the whole task, or None if it was not recorded.
    """

    documents: int
    seeds: int | None = None
    available: int | None = None

    @property
    def is_available(self) -> bool:
        """Return False if the whole task has fewer documents."""
        return self.available is None or self.documents <= self.available

    @property
    def remedy(self) -> str:
        """Sentence on the number of documents."""
        settling = f"{about(self.documents)} documents would settle it"
        if self.is_available:
            return settling
        available = plural(self.available or 0, "document")
        return f"{settling}, but the task has only {available}: use a larger task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The id of a rule of the family `verdict`, and the rule's sentence without a full stop."""

    rule: str
    text: str

    @classmethod
    def of(cls, rule: Rule, /, **facts: object) -> "Reason":
        """Return the reason with the facts of the rule's template."""
        return cls(rule=rule.id, text=rule.sentences(facts).got)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict(Difference):
    """Comparison on a task, or on a group of tasks that lm-eval aggregates.

    - `baseline` and `candidate` are the scores. Their values are lm-eval's aggregates.
    - `recovery` is candidate / baseline. It is None if lower scores are better or if the baseline's
      mean is not positive.
    - `seeds` is the number of sampled responses per document.
    - `clusters` is the number of tasks in a group with documents clustered by task, else None.
    - `answers` is None if neither model's endings are known.
    - `needed` is None if the outcome is settled, or if no number of documents would settle it.
    - `obstacle` is the reason why the task cannot pass, whatever its interval: it cannot show a
      loss, or too many responses do not count.
    - `also` lists the task's other metrics and filters, and the tasks of a group.
    - `faults` counts the responses that only the baseline got right, by the candidate's fault. It
      is empty for tasks that vexport does not ship.
    """

    baseline: Estimate
    candidate: Estimate
    recovery: Estimate | None
    changes: Changes
    seeds: int = 1
    clusters: int | None = None
    answers: Answers | None = None
    needed: Needed | None = None
    obstacle: Reason | None = None
    also: tuple[Comparison, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)

    @property
    def without_flips(self) -> "TaskVerdict":
        """The verdict without documents, for tables of several runs."""
        return replace(self, changes=replace(self.changes, flips=()))


TextMeasure = Literal[
    "KL to the baseline",
    "lower bound of the KL to the baseline",
    "rise of the NLL",
    "fall of the acceptance length",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """vLLM's counters of speculative decoding (`vllm:spec_decode_num_*`) for a prompt."""

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
    """Tokens per step of speculative decoding: 1 + accepted tokens / drafts, over all prompts.

    `draft_tokens` are the mean lengths of the drafts, for the baseline and the candidate.
    """

    method: str
    draft_tokens: tuple[float, float]
    baseline: float
    candidate: float


def bucket_label(start: int, end: int) -> str:
    """Return the name of a bucket of positions: `tokens 1,024-4,096`."""
    return f"tokens {start:,}-{end:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimit:
    """A measure of held-out text and its limit.

    The values are nats per token; for the acceptance length they are shares. `low` and `high` are
    the bounds that decide, None for a single row. `high` is at 1 - alpha. `low` is at 1 - alpha /
    n. Here n is the number of measures in all buckets together, because each of them can fail.
    `rows_needed` is the number of rows that would settle an INCONCLUSIVE outcome, or None if no
    number would. `bucket` is the start and the end of the tokens in each row; it is None if the
    measure covers all tokens.
    """

    measure: TextMeasure
    value: float
    low: float | None
    high: float | None
    limit: float
    outcome: Outcome
    rows_needed: int | None = None
    bucket: tuple[int, int] | None = None

    @property
    def is_share(self) -> bool:
        """Return True if the values are shares and not nats per token."""
        return self.measure == "fall of the acceptance length"

    @property
    def is_rise(self) -> bool:
        """Return True for the rise of the NLL, which may be negative."""
        return self.measure == "rise of the NLL"

    @property
    def label(self) -> str:
        """Return the name of the bucket, or "" if the measure covers all tokens."""
        return bucket_label(*self.bucket) if self.bucket else ""

    @property
    def name(self) -> str:
        """The measure, and the name of its bucket if it does not cover all tokens."""
        return ", ".join(filter(None, (self.measure, self.label)))

    @property
    def shown(self) -> str:
        """The value as reports show it. A KL has no sign, and shares are in per cent."""
        return self._number(self.value)

    @property
    def bounds(self) -> str:
        """The bounds that decide."""
        if self.low is None or self.high is None:
            return "no interval: one row"
        return f"{self._number(self.low)} to {self._number(self.high)}"

    @property
    def bound(self) -> str:
        """The limit as reports show it."""
        return f"{self.limit:.0%}" if self.is_share else f"{self.limit:g}"

    def _number(self, value: float) -> str:
        if self.is_share:
            return f"{value:+.1%}"
        return f"{value:+.3g}" if self.is_rise else f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNoise:
    """Difference between two readings of the same `rows` by the baseline, in a bucket.

    `kl` and `nll_rise` are means in nats per token. `changed` is the share of tokens with another
    likeliest token.
    """

    rows: int
    kl: float
    nll_rise: float
    changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBucket:
    """Results of both models on the tokens `start` to `end` - 1 of each row.

    The first token of a row has the number 0 and is not predicted. The NLLs are means over `tokens`
    of all rows. `changed` is the share of these tokens at which the models have different likeliest
    tokens, with a two-sided 1 - 2*alpha interval over rows. `limits` are the measures that decide.
    `noise` is None if the baseline read no row twice.
    """

    start: int
    end: int
    tokens: int
    baseline_nll: float
    candidate_nll: float
    changed: float
    changed_low: float | None
    changed_high: float | None
    limits: tuple[TextLimit, ...]
    noise: TextNoise | None = None

    @property
    def label(self) -> str:
        """Return the name of the bucket."""
        return bucket_label(self.start, self.end)

    @property
    def outcome(self) -> Outcome:
        """Return FAIL if a measure fails, PASS if all pass, else INCONCLUSIVE."""
        outcomes = {limit.outcome for limit in self.limits}
        if "FAIL" in outcomes:
            return "FAIL"
        return "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPoint:
    """A point of the curves over positions: means over the tokens `start` to `end` - 1 of each row.

    `noise` is the KL between two readings of the same rows by the baseline. It is None if it was
    not measured at these tokens.
    """

    start: int
    end: int
    baseline_nll: float
    candidate_nll: float
    kl: float
    noise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVerdict:
    """Both models' log-probabilities of held-out text. Without tasks, they decide the outcome.

    The NLLs are means over `tokens`. `top1_agreement` is the share of these tokens at which both
    models have the same likeliest token, with a two-sided 1 - 2*alpha interval over rows. `limits`
    has the worst bucket of each measure. `acceptance` has the acceptance lengths of drafts that
    continue the rows. It is None without speculative decoding.

    `buckets` groups the tokens of a row by position. `curve` has smaller groups, for a chart.
    """

    data: str
    digest: str
    rows: int
    tokens: int
    baseline_nll: float
    candidate_nll: float
    top1_agreement: float
    top1_low: float | None
    top1_high: float | None
    limits: tuple[TextLimit, ...]
    acceptance: AcceptanceLengths | None = None
    buckets: tuple[TextBucket, ...]
    curve: tuple[TextPoint, ...]

    @property
    def fails_late(self) -> bool:
        """Return True if a later bucket fails, and the first bucket passes."""
        outcomes = [bucket.outcome for bucket in self.buckets]
        return outcomes[:1] == ["PASS"] and "FAIL" in outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedBaseline:
    """The accepted baseline that a verdict compares with.

    `digest` is the first 16 digits of the SHA-256 of its file. `accepted` is the time at which the
    baseline was accepted.
    """

    digest: str
    accepted: str = ""


CandidateKind = Literal["quantized", "unquantized", "server", "candidate"]
"""Kind of the model that a verdict judges. It is `candidate` if only its results are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome over all tasks, with the rule and the sentence that justify it.

    - `pooled` compares the documents of all tasks together. It is None for a single task, or if a
      metric is not 0/1.
    - `warnings` describe weaknesses, such as missing samples or a changed environment.
    - `drift` and `attribution` are set by `vexport eval`. A run stores them in its report instead.
    - `checkpoint` is the candidate as the user named it for `vexport eval`.
    - `device` is the device that ran the candidate (`CPU, emulated`) or the server's address. It is
      empty if the results do not contain it.
    - `text` decides the outcome if there are no tasks. `margin` is then the limit of the NLL.
    - `margin` is the acceptable loss of tasks that are scored in shares. Tasks may have other
      margins.
    - `measured` is the time at which the candidate's evaluation began, if its results contain it.
    - `fingerprint` and `baseline_fingerprint` map everything that could change a score to its value
      (`vllm`, `model`, `task hash of gsm8k`). Values that were not recorded are missing.
    - `accepted` describes the accepted baseline, if the candidate was compared with one.
    - `candidate` is the kind of model that was compared with the baseline.
    """

    schema: Literal["vexport.verdict/1"] = "vexport.verdict/1"
    outcome: Outcome
    rule: str
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
    measured: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    baseline_fingerprint: Mapping[str, str] = field(default_factory=dict)
    accepted: AcceptedBaseline | None = None
    candidate: CandidateKind = "candidate"

    @property
    def worst_task(self) -> TaskVerdict | None:
        """Return the task with the lowest lower bound, or None without tasks.

        Bounds are compared as shares of the margin.
        """
        return min(self.tasks, key=lambda task: task.share_of_margin(task.low), default=None)
