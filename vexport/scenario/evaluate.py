"""Tasks, limits and how the models are asked; suites, named lists of lm-eval tasks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, field_validator, model_validator

from vexport.errors import nearest
from vexport.records import GENERATION_KEYS, BatchSize, Endpoint, GenKwargs
from vexport.records.accuracy import DEFAULT_CONCURRENCY, REQUEST_SECONDS
from vexport.scenario.section import ScenarioSection, located_error

SuiteName = Literal["quick", "standard", "code", "chat"]
Text = Annotated[str, Field(min_length=1)]
Url = Annotated[str, Field(pattern="^https?://")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tasks of lm-eval with their documents, the accepted loss in each, how many documents are
    asked at most.

    `apply_chat_template` is False where prompts are to be completed: humaneval ends an answer at
    the first `def`, which a turn of a chat begins with.
    """

    about: str
    tasks: Mapping[str, int]
    margin: float
    limit: int | None = None
    apply_chat_template: bool | None = None


# The share of answers that planning assumes to change, right or wrong.
TYPICAL_DISAGREEMENT = 0.05

# Margins and documents that show no loss with a power of 0.8 in each task. The documents are those
# of the tasks' own splits, of which `limit` takes the first. Tests hold the number of every task
# against the exact power of the test, at alpha 0.05 and 5 % of answers that change.
SUITES: Mapping[str, Suite] = {
    "quick": Suite(
        about="multiple choice, no generation",
        tasks={"arc_easy": 2376, "piqa": 1838, "winogrande": 1267},
        margin=0.02,
        limit=1000,
    ),
    "standard": Suite(
        about="multiple choice and mathematics",
        tasks={"arc_challenge": 1172, "hellaswag": 10042, "winogrande": 1267, "gsm8k": 1319},
        margin=0.02,
        limit=1319,
    ),
    "code": Suite(
        about="Python that is run: it needs --trust-remote-code",
        tasks={"humaneval": 164, "mbpp": 500},
        margin=0.05,
        apply_chat_template=False,
    ),
    "chat": Suite(
        about="instructions, mathematics and truthfulness",
        tasks={"ifeval": 541, "gsm8k": 1319, "truthfulqa_mc1": 817},
        margin=0.03,
    ),
}


DEFAULT_MARGIN = 0.02
DEFAULT_ALPHA = 0.05
# Nats a token. Good 4-bit exports of large models stay below a few hundredths (llama.cpp's KL
# tables of Q4_K); a rise of 0.05 in the NLL is 5 % of perplexity.
DEFAULT_KL_LIMIT = 0.1
DEFAULT_NLL_LIMIT = 0.05
DEFAULT_KL_PROMPTS = 16
# Rows of held-out text for a verdict: tokens in one row depend on each other, so rows are counted.
DEFAULT_TEXT_ROWS = 32
DEFAULT_TEXT_TOKENS = 512


class Evaluate(ScenarioSection):
    """The evaluation that decides: lm-eval tasks, the acceptable loss `margin` (0.02 = 2 points)
    and `alpha`.

    `suite` names a list of tasks with margin and limit in their place. In the place of tasks,
    `text`, named like calibration data, decides by the log-probabilities of its first `text_rows`
    rows of `text_tokens` tokens, and with `speculative`, METHOD or METHOD=FOLDER, by the acceptance
    length of drafts that continue them. `baseline` is the checkpoint to compare with, the source
    where it is not given. `gate` names the metric that decides, `metric` or `metric,filter`, for a
    task or a group (`"*"`: wherever it exists). `kl_limit` bounds the mean KL to the baseline and
    `nll_limit` the rise of the NLL, in nats a token, over the text or `kl_prompts` prompts at most:
    beyond them text fails, and where tasks decide is a warning.

    How the models are asked has lm-eval's own names and meanings, for both models alike. Without
    `apply_chat_template` (true, false or a template's name) a template is applied where the models
    have one; with one, few-shot examples are turns of a conversation unless `fewshot_as_multiturn`
    is false. With `seeds`, which need a `temperature`, each document of a generating task is
    answered so often. `include_path` names folders with more tasks. `limit` takes the first
    documents, below 1 a share of them.

    The checkpoint's answers to tasks come from the server at `endpoint`, the baseline's from that
    at `baseline_endpoint`, where they are given. The model behind an address is asked by `model`
    (`baseline_model`), where there are several, with the prompts of `tokenizer`: `concurrency` at a
    time, for at most `request_timeout` seconds each, and again for `retry_seconds` where the server
    fails.
    """

    tasks: tuple[str, ...] = ()
    suite: SuiteName | None = None
    text: Text | None = None
    text_rows: Annotated[int, Gt(0)] = DEFAULT_TEXT_ROWS
    text_tokens: Annotated[int, Gt(1)] = DEFAULT_TEXT_TOKENS
    speculative: Text | None = None
    include_path: tuple[Path, ...] = ()
    num_fewshot: Annotated[int, Ge(0)] | None = None
    apply_chat_template: bool | str | None = None
    fewshot_as_multiturn: bool | None = None
    system_instruction: Text | None = None
    gen_kwargs: GenKwargs = {}
    max_gen_toks: Annotated[int, Gt(0)] | None = None
    think_end_token: Text | None = None
    enable_thinking: bool | None = None
    batch_size: Annotated[BatchSize, Field(union_mode="left_to_right")] = "auto"
    margin: Annotated[float, Ge(0), Lt(1)] = DEFAULT_MARGIN
    alpha: Annotated[float, Gt(0), Lt(0.5)] = DEFAULT_ALPHA
    limit: int | float | None = None
    gate: dict[str, str] = {}
    baseline: str | None = None
    seed: int = 0
    seeds: Annotated[int, Gt(0), Le(64)] = 1
    kl_limit: Annotated[float, Gt(0)] = DEFAULT_KL_LIMIT
    nll_limit: Annotated[float, Gt(0)] = DEFAULT_NLL_LIMIT
    kl_prompts: Annotated[int, Gt(0)] = DEFAULT_KL_PROMPTS
    endpoint: Url | None = None
    baseline_endpoint: Url | None = None
    tokenizer: Text | None = None
    model: Text | None = None
    baseline_model: Text | None = None
    concurrency: Annotated[int, Gt(0), Le(4096)] = DEFAULT_CONCURRENCY
    request_timeout: Annotated[float, Gt(0)] = REQUEST_SECONDS
    retry_seconds: Annotated[float, Ge(0)] = REQUEST_SECONDS

    def asking(self, url: str, *, is_baseline: bool) -> Endpoint:
        """The endpoint at an address, and how it is asked."""
        return Endpoint(
            url=url,
            model=(self.baseline_model if is_baseline else None) or self.model,
            concurrency=self.concurrency,
            request_timeout=self.request_timeout,
            retry_seconds=self.retry_seconds,
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_suite(cls, content: object) -> object:
        name = content.get("suite") if isinstance(content, dict) else None
        if not isinstance(content, dict) or not isinstance(name, str) or name not in SUITES:
            return content
        suite, given = SUITES[name], content.get("tasks")
        tasks, template = tuple(suite.tasks), suite.apply_chat_template
        if given and (not isinstance(given, list | tuple) or tuple(given) != tasks):
            raise located_error("tasks", given, "a suite, or tasks", "remove one of the two")
        defaults = {"margin": suite.margin, "limit": suite.limit, "apply_chat_template": template}
        return {**defaults, **content, "tasks": tasks}

    @field_validator("include_path", mode="before")
    @classmethod
    def _wrap_single_folder(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("apply_chat_template", mode="before")
    @classmethod
    def _check_chat_template(cls, value: object) -> object:
        if not isinstance(value, bool | str | None) or value == "":
            raise ValueError("true, false or the name of one of the model's templates")
        return value

    @field_validator("limit")
    @classmethod
    def _check_limit(cls, value: int | float | None) -> int | float | None:
        if value is not None and (not 0 < value < 2**53 or value >= 1 and value != int(value)):
            raise ValueError("a number of documents from 1, or a share of them below 1")
        return value if value is None or value < 1 else int(value)

    @field_validator("batch_size")
    @classmethod
    def _check_batch_size(cls, value: BatchSize) -> BatchSize:
        if value != "auto" and value < 1:
            raise ValueError("auto, or a number of requests from 1")
        return value

    @field_validator("gen_kwargs")
    @classmethod
    def _check_spelling_of_gen_kwargs(cls, value: GenKwargs) -> GenKwargs:
        hints = {key: nearest(key, GENERATION_KEYS) for key in value if key not in GENERATION_KEYS}
        if wrong := [f"{key}{hint}" for key, hint in hints.items() if hint]:
            raise ValueError(f"arguments that vLLM knows, not {', '.join(wrong)}")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        no_template = self.apply_chat_template is False
        unlike = bool(self.gen_kwargs.get("temperature"))
        for key, is_wrong, need in (
            ("tasks", bool(self.tasks) == bool(self.text), "either tasks (or a suite) or text"),
            ("fewshot_as_multiturn", self.fewshot_as_multiturn and no_template, "a chat template"),
            ("endpoint", self.text and self.endpoint, "tasks alone: text is read here"),
            (
                "baseline_endpoint",
                self.text and self.baseline_endpoint,
                "tasks alone: text is read here",
            ),
            (
                "speculative",
                self.speculative and not self.text,
                "text, whose rows the drafts continue",
            ),
            (
                "seeds",
                self.seeds > 1 and not unlike,
                "a temperature in gen_kwargs: greedy answers are alike",
            ),
            (
                "enable_thinking",
                self.enable_thinking and not self.think_end_token,
                "a think_end_token",
            ),
        ):
            if is_wrong:
                raise located_error(key, getattr(self, key), need, "correct one of the two")
        return self
