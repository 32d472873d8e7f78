"""What a scenario may say: its sections, their keys and defaults."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, ConfigDict, Field, JsonValue, Strict, field_validator, model_validator

from vexport.checkpoint.data_name import DEFAULT, parse_data
from vexport.errors import nearest
from vexport.formats.schemes import KEEP, fold_name, is_scheme, scheme_name, scheme_names
from vexport.plugins import ROUNDINGS as PLUGIN_ROUNDINGS
from vexport.plugins import plugins
from vexport.scenario.located import located_errors
from vexport.scenario.scheme_keys import GroupSize, with_named_scheme
from vexport.scenario.serve import Serve
from vexport.scenario.suites import SUITES, SuiteName
from vexport.types import (
    GENERATION_KEYS,
    BatchSize,
    BudgetKind,
    CalibrationData,
    GenKwargs,
    KvCache,
    Method,
    OnUnsupportedShape,
)
from vexport.types.patterns import REFUSED
from vexport.types.rounding import ROUNDINGS, Rounding

# llm-compressor's usual calibration: 512 samples suffice for min-max of inputs; 128 on small models.
DEFAULT_SAMPLES = 128
DEFAULT_SEQ_LEN = 512
DEFAULT_MARGIN = 0.02
DEFAULT_ALPHA = 0.05
# Nats a token. Good 4-bit exports of large models stay below a few hundredths (llama.cpp's KL tables of
# Q4_K); a rise of 0.05 in the NLL is 5 % of perplexity.
DEFAULT_KL_LIMIT = 0.1
DEFAULT_NLL_LIMIT = 0.05
DEFAULT_KL_PROMPTS = 16
# Of held-out text that decides. On one row the tokens depend on each other: rows count, not tokens.
DEFAULT_TEXT_ROWS = 32
DEFAULT_TEXT_TOKENS = 512
# The scheme of a rule that leaves the choice to measured losses and a budget.
AUTO = "auto"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Strict):
    """Which layers get which scheme; in a list of rules the first match wins.

    `match` is "Linear" (every linear layer), a module's name, the last parts of one (`lm_head`,
    `self_attn.q_proj`), or `re:` and a regular expression anchored at the start of the name. Scheme `auto`
    chooses among the candidates of the scenario's `auto`. `rounding` gptq or refit needs calibration text;
    without it weights of fewer than 8 bits are refitted where there is text. Without `observer` scales are
    those that suit the rounding.

    A scheme is its name, also with a `group_size` (channel: one scale a row), or `weights` and
    `input_activations` as compressed-tensors writes them. Once read, all are a name in `scheme`.
    """

    match: str
    scheme: str
    group_size: GroupSize | None = Field(default=None, exclude=True)
    weights: dict[str, JsonValue] | None = Field(default=None, exclude=True)
    input_activations: dict[str, JsonValue] | None = Field(default=None, exclude=True)
    observer: str | None = None
    rounding: Rounding | None = None

    @model_validator(mode="before")
    @classmethod
    def _names_its_scheme(cls, content: object) -> object:
        return with_named_scheme(content) if isinstance(content, dict) else content

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value.removeprefix("re:") if value.startswith("re:") else "")
        except REFUSED as error:
            raise ValueError(f"a regular expression after re: ({error})") from None
        return value

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        name = scheme_name(value)
        return name if is_scheme(name) else _known(value, (*scheme_names(), KEEP, AUTO))

    @field_validator("rounding")
    @classmethod
    def _known_rounding(cls, value: str | None) -> str | None:
        return None if value is None else _known(value, (*ROUNDINGS, *plugins(PLUGIN_ROUNDINGS)))


class Auto(_Strict):
    """What `scheme: auto` chooses from, and its one budget for the whole checkpoint.

    `bits` are bits per weight, `bytes` the size, `share` the part of the source's size (0.4), `loss` the sum
    over all quantized layers of KL(source || quantized) in nats per token.
    """

    candidates: Annotated[tuple[str, ...], Field(min_length=2)]
    bits: Annotated[float, Gt(0)] | None = None
    bytes: Annotated[int, Gt(0)] | None = None
    share: Annotated[float, Gt(0), Lt(1)] | None = None
    loss: Annotated[float, Gt(0)] | None = None

    @field_validator("candidates", mode="before")
    @classmethod
    def _names_of_candidates(cls, values: object) -> object:
        """A candidate may be the keys of a rule that say its scheme."""
        if not isinstance(values, list):
            return values
        return [with_named_scheme(one).get("scheme") if isinstance(one, dict) else one for one in values]

    @field_validator("candidates")
    @classmethod
    def _known_candidates(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        known = (*scheme_names(), KEEP)
        named = map(scheme_name, values)
        names = tuple(name if is_scheme(name) else _known(name, known) for name in named)
        if len(set(names)) < len(names):
            raise ValueError("each candidate once")
        return names

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len(self._budgets()) != 1:
            raise ValueError("one budget: bits, bytes, share or loss")
        return self

    def _budgets(self) -> list[tuple[BudgetKind, float]]:
        kinds: dict[BudgetKind, float | None] = {
            "bits": self.bits,
            "bytes": self.bytes,
            "share": self.share,
            "loss": self.loss,
        }
        return [(kind, limit) for kind, limit in kinds.items() if limit is not None]

    @property
    def budget(self) -> tuple[BudgetKind, float]:
        """The budget's kind and limit."""
        return self._budgets()[0]


class Sensitivity(_Strict):
    """How the loss of each group of layers is found: the first `samples` rows of the calibration are run with
    one group quantized at a time, to the model's output (`measure`) or, several times as fast, mostly no
    further than the group's own decoder layer (`estimate`).
    """

    method: Method = "measure"
    samples: Annotated[int, Gt(0)] = 16


class Calibration(_Strict):
    """Text that shows the inputs of the layers.

    `data` is a file or folder, ORG/NAME[@REVISION][:SPLIT[:COLUMN]] of a data set on the hub, or `default`,
    the text that ships with vexport. `split`, `subset` and `column` choose of a data set, `seed` shuffles its
    rows. `pack` joins rows into samples of `seq_len` tokens; without it only plain text is joined.

    With `all_experts` the statistics of every expert see all tokens. `device` is torch's name of where the
    layers run; without one it is a GPU where there is one. By `held_out` rows, without it by
    a share of them, a refit's strength is chosen; 0 takes a quarter of the refit without a trial.
    """

    data: Annotated[str, Field(min_length=1)]
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    samples: Annotated[int, Gt(0), Strict()] = DEFAULT_SAMPLES
    seq_len: Annotated[int, Gt(0), Strict()] = DEFAULT_SEQ_LEN
    seed: Annotated[int, Ge(0)] | None = None
    pack: bool | None = None
    all_experts: bool = True
    device: str | None = None
    held_out: Annotated[int, Ge(0)] | None = None

    @field_validator("data", mode="before")
    @classmethod
    def _or_a_path(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @property
    def path(self) -> Path | None:
        """The file or folder of the data; None of a data set that is none."""
        name = parse_data(self.data)
        return name.path if name.kind == "path" else None

    def source(self, samples: int | None = None) -> CalibrationData:
        """What is read, the whole of it or so many samples."""
        return CalibrationData(
            name=self.data,
            samples=samples or self.samples,
            seq_len=self.seq_len,
            split=self.split,
            subset=self.subset,
            column=self.column or parse_data(self.data).column,
            seed=self.seed,
            pack=self.pack,
        )


def default_calibration() -> Calibration:
    """The text that ships with vexport, where none was named."""
    return Calibration(data=DEFAULT)


class Evaluate(_Strict):
    """What decides: lm-eval tasks, the acceptable loss `margin` (0.02 = 2 points) and `alpha`.

    `suite` names a list of tasks with margin and limit in their place. In the place of tasks, `text`, named
    like calibration data, decides by the log-probabilities of its first `text_rows` rows of `text_tokens`
    tokens. `baseline` is the checkpoint to compare with, the source where it is not given. `gate` names the
    metric that decides, `metric` or `metric,filter`, for a task or a group (`"*"`: wherever it exists). With
    `stopping: early` the checkpoint is read no further than the answer needs. `kl_limit` bounds the mean KL
    to the baseline and `nll_limit` the rise of the NLL, in nats a token, over the text or `kl_prompts`
    prompts at most: beyond them text fails, and where tasks decide is a warning.

    How the models are asked has lm-eval's own names and meanings, for both models alike. Without
    `apply_chat_template` (true, false or a template's name) a template is applied where the models have one;
    with one, few-shot examples are turns of a conversation unless `fewshot_as_multiturn` is false.
    `include_path` names folders with more tasks. `limit` takes the first documents, below 1 a share of them.
    """

    tasks: tuple[str, ...] = ()
    suite: SuiteName | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    text_rows: Annotated[int, Gt(0)] = DEFAULT_TEXT_ROWS
    text_tokens: Annotated[int, Gt(1)] = DEFAULT_TEXT_TOKENS
    include_path: tuple[Path, ...] = ()
    num_fewshot: Annotated[int, Ge(0)] | None = None
    apply_chat_template: bool | str | None = None
    fewshot_as_multiturn: bool | None = None
    system_instruction: Annotated[str, Field(min_length=1)] | None = None
    gen_kwargs: GenKwargs = {}
    max_gen_toks: Annotated[int, Gt(0)] | None = None
    think_end_token: Annotated[str, Field(min_length=1)] | None = None
    enable_thinking: bool | None = None
    batch_size: Annotated[BatchSize, Field(union_mode="left_to_right")] = "auto"
    margin: Annotated[float, Ge(0), Lt(1)] = DEFAULT_MARGIN
    alpha: Annotated[float, Gt(0), Lt(0.5)] = DEFAULT_ALPHA
    limit: int | float | None = None
    gate: dict[str, str] = {}
    stopping: Literal["fixed", "early"] = "fixed"
    baseline: str | None = None
    seed: int = 0
    kl_limit: Annotated[float, Gt(0)] = DEFAULT_KL_LIMIT
    nll_limit: Annotated[float, Gt(0)] = DEFAULT_NLL_LIMIT
    kl_prompts: Annotated[int, Gt(0)] = DEFAULT_KL_PROMPTS

    @model_validator(mode="before")
    @classmethod
    def _of_a_suite(cls, content: object) -> object:
        """The tasks, margin and limit of a suite, where they are not given."""
        name = content.get("suite") if isinstance(content, dict) else None
        if not isinstance(content, dict) or not isinstance(name, str) or name not in SUITES:
            return content
        suite = SUITES[name]
        tasks, given = tuple(task.name for task in suite.tasks), content.get("tasks")
        if given and (not isinstance(given, list | tuple) or tuple(given) != tasks):
            raise located_errors([(("tasks",), given, "a suite, or tasks", "remove one of the two")])
        return {"margin": suite.margin, "limit": suite.limit, **content, "tasks": tasks}

    @field_validator("include_path", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("apply_chat_template", mode="before")
    @classmethod
    def _whether_or_which(cls, value: object) -> object:
        if not isinstance(value, bool | str | None) or value == "":
            raise ValueError("true, false or the name of one of the model's templates")
        return value

    @field_validator("limit")
    @classmethod
    def _number_or_share(cls, value: int | float | None) -> int | float | None:
        if value is not None and (not 0 < value < 2**53 or value >= 1 and value != int(value)):
            raise ValueError("a number of documents from 1, or a share of them below 1")
        return value if value is None or value < 1 else int(value)

    @field_validator("batch_size")
    @classmethod
    def _positive(cls, value: BatchSize) -> BatchSize:
        if value != "auto" and value < 1:
            raise ValueError("auto, or a number of requests from 1")
        return value

    @field_validator("gen_kwargs")
    @classmethod
    def _spelled_right(cls, value: GenKwargs) -> GenKwargs:
        hints = {key: nearest(key, GENERATION_KEYS) for key in value if key not in GENERATION_KEYS}
        if wrong := [f"{key}{hint}" for key, hint in hints.items() if hint]:
            raise ValueError(f"arguments that vLLM knows, not {', '.join(wrong)}")
        return value

    @model_validator(mode="after")
    def _tasks_or_text(self) -> Self:
        if bool(self.tasks) == bool(self.text):
            need, fix = "either tasks (or a suite) or text", "give one of the two"
            raise located_errors([(("tasks",), list(self.tasks), need, fix)])
        if self.text and self.stopping == "early":
            raise ValueError("`stopping: early` with tasks: text is read as a whole")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.fewshot_as_multiturn and self.apply_chat_template is False:
            raise ValueError("`fewshot_as_multiturn: true` only where a chat template is applied")
        if self.enable_thinking and self.think_end_token is None:
            raise ValueError("`think_end_token` with `enable_thinking: true`, to cut the thinking off")
        return self


# Names that keys of a scenario had before.
FORMER_KEYS = {"on_misfit": "on_unsupported_shape"}


class Scenario(_Strict):
    """One complete run.

    `source` is a folder or a model of the hub, `revision` its branch, tag or commit (or ORG/NAME@REVISION).
    `on_unsupported_shape` says what becomes of layers whose shapes vLLM could not run; `kv_cache` how keys
    and values are stored, in the model's dtype where it is not given. With `sensitivity` the report says
    what quantizing each group of layers costs; a rule with scheme `auto` needs `auto` and implies it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    source: str
    revision: str | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    on_unsupported_shape: OnUnsupportedShape = "refuse"
    kv_cache: KvCache | None = None
    calibration: Calibration | None = None
    auto: Auto | None = None
    sensitivity: Sensitivity | None = None
    serve: Serve = Serve()
    evaluate: Evaluate | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_former_keys(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        renamed = {old: new for old, new in FORMER_KEYS.items() if new not in content}
        return {renamed.get(key, key): value for key, value in content.items()}

    @model_validator(mode="after")
    def _has_what_auto_needs(self) -> Self:
        if self.is_mixed != (self.auto is not None):
            raise ValueError("a rule with scheme: auto and the section `auto` with its budget, or neither")
        if self.calibration is None and (self.is_mixed or self.sensitivity):
            raise ValueError("`calibration`, whose first samples show what each group of layers costs")
        return self

    @property
    def run_dir(self) -> Path:
        """Where everything goes unless a command names another folder."""
        return Path("runs") / self.name

    @property
    def is_mixed(self) -> bool:
        """Whether a rule leaves the choice of schemes to a budget."""
        return any(rule.scheme == AUTO for rule in self.rules)


def _known(value: str, known: Sequence[str]) -> str:
    """The known name that `value` spells, in whatever case and with `-` or `_`; ValueError lists them all."""
    names = {fold_name(name): name for name in known}
    if fold_name(value) not in names:
        raise ValueError(f"one of {', '.join(known)}{nearest(value, known)}")
    return names[fold_name(value)]
