"""Settings of an evaluation, and suites (named lists of lm-eval tasks)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vexport.checkpoint.source import parse_data
from vexport.errors import nearest_hint
from vexport.records import GENERATION_KEYS, BatchSize, CalibrationData, Endpoint, GenKwargs
from vexport.records.accuracy import DEFAULT_CONCURRENCY, REQUEST_SECONDS
from vexport.records.chosen_metric import parse_chosen_metric
from vexport.records.margin import DEFAULT_MARGIN, DEFAULT_RELATIVE_MARGIN, parse_margin
from vexport.records.values import MOST_COUNT, Positive
from vexport.scenario.declaring import Key, Option
from vexport.scenario.model_names import ModelSetting, SourceSetting, UserText
from vexport.scenario.section import ScenarioSection, located_error

SuiteName = Literal["quick", "standard", "code", "chat"]
Text = Annotated[str, Field(min_length=1)]
_URL = "^https?://"
SIGHT = "sight"
"""Name of the task that ships with vexport and asks about pictures."""
TOOL_CALLS = "tool-calls"
"""Name of the task that ships with vexport and asks for calls of tools."""


def _check_url(value: str) -> str:
    if re.match(_URL, value) is None:
        raise ValueError("an address that begins with http:// or https://")
    return value


Url = Annotated[
    str, AfterValidator(_check_url), WithJsonSchema({"type": "string", "pattern": _URL})
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tasks of lm-eval with their numbers of documents and the settings that suit them.

    `margin` is the accepted loss, and `limit` the maximum number of documents per task.
    `apply_chat_template` is False for completion tasks. For example, humaneval ends a response at
    the first `def`, and a response in a chat begins with `def`.
    """

    about: str
    tasks: Mapping[str, int]
    margin: float
    limit: int | None = None
    apply_chat_template: bool | None = None


# Assumed share of responses that change from right to wrong or from wrong to right. `vexport plan`
# computes the necessary number of documents from it.
TYPICAL_DISAGREEMENT = 0.05

# With these margins and numbers of documents, a model without any loss passes each task with a
# probability (power) of at least 0.8. A test computes this power exactly, for alpha 0.05 and with
# 5 % of the responses changed. The numbers of documents are the sizes of the tasks' splits. `limit`
# takes the first documents of a split.
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


DEFAULT_ALPHA = 0.05
# Nats per token. Good 4-bit exports of large models stay below a few hundredths (llama.cpp's KL
# tables of Q4_K). A rise of the NLL by 0.05 is a rise of the perplexity by 5 %.
DEFAULT_KL_LIMIT = 0.1
DEFAULT_NLL_LIMIT = 0.05
DEFAULT_KL_PROMPTS = 16
# Number of rows of held-out text for a verdict. The statistics treat rows as independent samples.
# Tokens are not independent, because the tokens of a row depend on each other.
DEFAULT_TEXT_ROWS = 32
DEFAULT_TEXT_TOKENS = 512


def _check_margin(value: object) -> object:
    given = list(value.values()) if isinstance(value, dict) else [value]
    for margin in given if value is not None else []:
        parse_margin(margin)
    if isinstance(value, dict) and not all(isinstance(task, str) for task in value):
        raise ValueError("names of tasks as keys")
    return value


MarginSetting = Annotated[
    float | str | dict[str, float | str] | None,
    BeforeValidator(_check_margin),
    Option(
        "Acceptable loss: 0.02 is 2 points; 1% is relative, for metrics that are not shares.",
        "Verdict",
        metavar="[TASK=]M|P%",
        unset=f"{DEFAULT_MARGIN} or {100 * DEFAULT_RELATIVE_MARGIN:g}%",
        more='A suite has its own. In a scenario also by task: `{gsm8k: 0.03, wikitext: "2%"}`.',
    ),
]
AlphaSetting = Annotated[
    float,
    Gt(0),
    Lt(0.5),
    Option(
        "Accepted probability of a wrong PASS.",
        "Verdict",
        metavar="A",
    ),
]


def _check_gates(value: dict[str, str]) -> dict[str, str]:
    for metric in value.values():
        parse_chosen_metric(metric)
    return value


GateSetting = Annotated[
    dict[str, str],
    AfterValidator(_check_gates),
    Option(
        "Metric of the verdict, for a task or for all tasks.",
        "Verdict",
        metavar="[TASK=]METRIC[:higher|:lower][,FILTER]",
        unset="`exact_match`, else `acc`, else `pass@1`, else another",
        more='In a scenario `{gsm8k: "exact_match,flexible-extract", asr: "wer:lower"}`. See '
        "[tasks and metrics](metrics.md#tasks-and-metrics).",
    ),
]


class QuestionSettings(ScenarioSection):
    """Settings that select the questions: tasks or text. If they change, the models run again."""

    tasks: Annotated[
        tuple[UserText, ...],
        Option(
            "Tasks or task groups of lm-eval by name, or YAML files of tasks.",
            "Tasks",
            names="--task --tasks",
            metavar="T,...",
            more="Required without `suite` and `text`.",
        ),
    ] = ()
    suite: Annotated[
        SuiteName | None,
        Key(
            "Named list of tasks with suitable settings, instead of `tasks`.",
            more="See [suites](evaluation.md#choose-the-tasks).",
        ),
    ] = None
    text: Annotated[
        Text | None,
        Option(
            "Held-out text for the verdict, instead of tasks; same forms as calibration data.",
            "Tasks",
            metavar="DATA",
            more="See [text](text.md).",
        ),
    ] = None
    text_rows: Annotated[
        Positive,
        Option("Number of rows of the text to read.", "Tasks"),
    ] = DEFAULT_TEXT_ROWS
    text_tokens: Annotated[
        int,
        Gt(1),
        Le(MOST_COUNT),
        Option(
            "Number of tokens of each row of the text.",
            "Tasks",
            metavar="N",
            more="More tokens test [long contexts](text.md#long-contexts).",
        ),
    ] = DEFAULT_TEXT_TOKENS
    speculative: Annotated[
        Annotated[UserText, Field(min_length=1)] | None,
        Option(
            "With text: also compare the acceptance length of drafts (`mtp`, `ngram`, "
            "`eagle3=FOLDER`).",
            "Tasks",
            metavar="METHOD",
        ),
    ] = None
    include_path: Annotated[
        tuple[Path, ...],
        Option("Folder with additional tasks of lm-eval.", "Tasks", metavar="DIR"),
    ] = ()
    tools: Annotated[
        Path | None,
        Option(
            "Tools for the task tool-calls: a JSON file with a list of tools in OpenAI's form.",
            "Tasks",
            metavar="FILE",
            unset="128 tools that ship with vexport",
            more="See [tool calls](tool-calls.md).",
        ),
    ] = None
    kl_prompts: Annotated[
        int,
        Gt(0),
        Key("Maximum number of prompts to measure KL and NLL on."),
    ] = DEFAULT_KL_PROMPTS

    @field_validator("include_path", mode="before", json_schema_input_type=str | tuple[Path, ...])
    @classmethod
    def _wrap_single_folder(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class ResponseSettings(ScenarioSection):
    """Settings that shape prompts, responses and scores of tasks, for both models.

    If they change, the models run again. Accepted baselines store them. Settings that are arguments
    of lm-eval have the argument's name, and are passed on to it.
    """

    num_fewshot: Annotated[
        int | None,
        Ge(0),
        Option("Number of examples in each prompt.", "Prompts", unset="set by the task"),
    ] = None
    apply_chat_template: Annotated[
        bool | str | None,
        Option(
            "Apply the chat template.",
            "Prompts",
            unset="applied if the models have a template, except for suite `code`",
            more="Tasks that score plain text do not get it then, either. A name chooses one of "
            "several templates.",
        ),
    ] = None
    fewshot_as_multiturn: Annotated[
        bool | None,
        Option(
            "Write examples as turns of a conversation.",
            "Prompts",
            unset="turns, if a chat template is applied",
        ),
    ] = None
    system_instruction: Annotated[
        Text | None,
        Option("System prompt.", "Prompts", metavar="TEXT"),
    ] = None
    gen_kwargs: Annotated[
        GenKwargs,
        Option("Generation arguments that override the task's.", "Prompts", metavar="K=V,..."),
    ] = {}
    max_gen_toks: Annotated[
        int | None,
        Gt(0),
        Option("Maximum number of new tokens, if the task sets none.", "Prompts", unset="256"),
    ] = None
    think_end_token: Annotated[
        Text | None,
        Option(
            "Score only the text after this token, such as `</think>`.", "Prompts", metavar="TEXT"
        ),
    ] = None
    enable_thinking: Annotated[
        bool | None,
        Option(
            "Value of `enable_thinking` for the chat template.",
            "Prompts",
            unset="the template decides",
        ),
    ] = None
    tool_call_parser: Annotated[
        Text | None,
        Option(
            "Parser of vLLM for the task tool-calls in an engine, as for `vllm serve`.",
            "Prompts",
            metavar="NAME",
        ),
    ] = None
    limit: Annotated[
        int | float | None,
        Option(
            "Use the first N documents of each task, or a share of them if N is below 1.",
            "Tasks",
            metavar="N",
        ),
    ] = None
    seed: Annotated[
        int,
        Key("Seed of vLLM and lm-eval."),
    ] = 0
    seeds: Annotated[
        int,
        Gt(0),
        Le(64),
        Option(
            "Number of sampled responses per document, for tasks that generate text.",
            "Prompts",
            metavar="N",
            more="Needs a temperature above 0, such as `gen_kwargs: {temperature: 0.6}`.",
        ),
    ] = 1

    @field_validator("apply_chat_template", mode="before")
    @classmethod
    def _check_chat_template(cls, value: object) -> object:
        if not isinstance(value, bool | str | None) or value == "":
            raise ValueError("true, false or the name of a chat template")
        return value

    @field_validator("limit")
    @classmethod
    def _check_limit(cls, value: int | float | None) -> int | float | None:
        if value is not None and (not 0 < value < 2**53 or value >= 1 and value != int(value)):
            raise ValueError("a whole number of documents, or a share between 0 and 1")
        return value if value is None or value < 1 else int(value)

    @field_validator("gen_kwargs")
    @classmethod
    def _check_spelling_of_gen_kwargs(cls, value: GenKwargs) -> GenKwargs:
        hints = {
            key: nearest_hint(key, GENERATION_KEYS) for key in value if key not in GENERATION_KEYS
        }
        if wrong := [f"{key}{hint}" for key, hint in hints.items() if hint]:
            raise ValueError(f"arguments that vLLM supports, not {', '.join(wrong)}")
        return value


class JudgementSettings(ScenarioSection):
    """Settings of the verdict. If they change, the stored responses are judged again."""

    margin: MarginSetting = None
    alpha: AlphaSetting = DEFAULT_ALPHA
    gate: GateSetting = {}
    kl_limit: Annotated[
        float,
        Gt(0),
        Option(
            "Warn if the mean KL exceeds this number of nats per token; with text, fail.",
            "Verdict",
            metavar="NATS",
        ),
    ] = DEFAULT_KL_LIMIT
    nll_limit: Annotated[
        float,
        Gt(0),
        Option(
            "Warn if the NLL rises by more than this number of nats per token; with text, fail.",
            "Verdict",
            metavar="NATS",
        ),
    ] = DEFAULT_NLL_LIMIT


class ModelSettings(ScenarioSection):
    """Settings that select the models. If they change, the models run again."""

    baseline: Annotated[
        ModelSetting | None,
        Key("The checkpoint to compare with.", unset="the source"),
    ] = None
    endpoint: Annotated[
        Url | None,
        Key("Address of a server that runs the checkpoint, for the tasks."),
    ] = None
    baseline_endpoint: Annotated[
        Url | None,
        Key("Address of a server that runs the baseline, for the tasks."),
    ] = None
    tokenizer: Annotated[
        SourceSetting | None,
        Option(
            "Tokenizer of a served model: a folder or `ORG/NAME`.",
            "Servers",
            metavar="T",
            more="See [served models](servers.md).",
        ),
    ] = None
    model: Annotated[
        Text | None,
        Option("Name of the model, if the server has several.", "Servers", metavar="NAME"),
    ] = None
    baseline_model: Annotated[
        Text | None,
        Option(
            "Name of the baseline, if its server has several models.",
            "Servers",
            metavar="NAME",
            unset="`model`",
        ),
    ] = None


class TransportSettings(ScenarioSection):
    """Settings of the requests to a model. If they change, no model runs again."""

    batch_size: Annotated[
        BatchSize,
        Field(union_mode="left_to_right"),
        Option(
            "Number of requests that vLLM gets at once; `auto` is four times `max_num_seqs`.",
            "Tasks",
            metavar="N|auto",
        ),
    ] = "auto"
    concurrency: Annotated[
        int,
        Gt(0),
        Le(4096),
        Option("Maximum number of simultaneous requests to a server.", "Servers"),
    ] = DEFAULT_CONCURRENCY
    request_timeout: Annotated[
        float,
        Gt(0),
        Option(
            "Maximum number of seconds for a response of a server.",
            "Servers",
            metavar="S",
        ),
    ] = REQUEST_SECONDS
    retry_seconds: Annotated[
        float,
        Ge(0),
        Option(
            "Number of seconds during which failed requests to a server are repeated.",
            "Servers",
            metavar="S",
        ),
    ] = REQUEST_SECONDS

    @field_validator("batch_size")
    @classmethod
    def _check_batch_size(cls, value: BatchSize) -> BatchSize:
        if value != "auto" and value < 1:
            raise ValueError("auto or a number of requests above 0")
        return value


class LmEvalSettings(ResponseSettings):
    """Settings of lm-eval after the chat template was chosen.

    `no_template_for_plain_text` skips the template for tasks that score the log-likelihood of plain
    text.
    """

    no_template_for_plain_text: bool = False


# Each setting is in the base class for what it shapes. Pydantic lists the fields of the last base
# class first.
class Evaluate(
    TransportSettings, ModelSettings, JudgementSettings, ResponseSettings, QuestionSettings
):
    """Evaluation for the verdict: tasks or text, settings of prompts and generation, and limits.

    Tasks are judged by the loss in their metrics. Text is judged by the log-probabilities of its
    tokens, and with `speculative` also by the acceptance length of drafts. Settings of prompts have
    the names and meanings of lm-eval, and apply to both models.
    """

    def endpoint_at(self, url: str, *, is_baseline: bool) -> Endpoint:
        """Return the endpoint at this address, with these settings for requests."""
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
        suite = SUITES[name]
        tasks, template = tuple(suite.tasks), suite.apply_chat_template
        given = content.get("tasks")
        if given and (not isinstance(given, list | tuple) or tuple(given) != tasks):
            raise located_error("tasks", given, "either tasks or suite", "remove one of them")
        defaults = {"margin": suite.margin, "limit": suite.limit, "apply_chat_template": template}
        return {**defaults, **content, "tasks": tasks}

    def held_out(self) -> CalibrationData | None:
        """Return the text as `CalibrationData`, or None if there is no text."""
        if self.text is None:
            return None
        return CalibrationData(
            name=self.text,
            samples=self.text_rows,
            seq_len=self.text_tokens,
            column=parse_data(self.text).column,
            pack=True,
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        has_text = self.text is not None
        is_greedy = not self.gen_kwargs.get("temperature")
        multiturn_without_template = (
            bool(self.fewshot_as_multiturn) and self.apply_chat_template is False
        )
        no_end_token = bool(self.enable_thinking) and self.think_end_token is None
        both, missing = "remove one of them", "add it, or remove this setting"
        calls_tools = any(task.startswith(TOOL_CALLS) for task in self.tasks)
        no_calls = f"the task {TOOL_CALLS}"
        no_server = (
            "tasks: a scenario does not score text with a server (`vexport eval URL --text` does)"
        )
        for key, is_wrong, need, fix in (
            ("tasks", bool(self.tasks) and has_text, "either tasks (or a suite) or text", both),
            ("tasks", not self.tasks and not has_text, "tasks, a suite or text", "add one of them"),
            (
                "fewshot_as_multiturn",
                multiturn_without_template,
                "a chat template, but apply_chat_template is false",
                both,
            ),
            ("endpoint", has_text and self.endpoint is not None, no_server, both),
            ("baseline_endpoint", has_text and self.baseline_endpoint is not None, no_server, both),
            (
                "speculative",
                self.speculative is not None and not has_text,
                "text, on which drafts are measured",
                missing,
            ),
            (
                "seeds",
                self.seeds > 1 and is_greedy,
                "temperature in gen_kwargs: greedy responses are all equal",
                missing,
            ),
            ("enable_thinking", no_end_token, "think_end_token", missing),
            ("tools", self.tools is not None and not calls_tools, no_calls, missing),
            (
                "tool_call_parser",
                self.tool_call_parser is not None and not calls_tools,
                no_calls,
                missing,
            ),
            (
                "apply_chat_template",
                calls_tools and self.apply_chat_template is False,
                f"a chat template, which lists the tools of {TOOL_CALLS}",
                both,
            ),
            (
                "apply_chat_template",
                SIGHT in self.tasks and self.apply_chat_template is False,
                f"a chat template, which has a place for the pictures of {SIGHT}",
                both,
            ),
        ):
            if is_wrong:
                raise located_error(key, getattr(self, key), need, fix)
        return self
