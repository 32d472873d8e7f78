"""How lm-eval asks a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BatchSize = int | Literal["auto"]
Scalar = bool | int | float | str | None
GenKwargs = Mapping[str, Scalar | list[Scalar] | dict[str, Scalar]]
GENERATION_KEYS = (
    "do_sample",
    "until",
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "thinking_token_budget",
)
"""What lm-eval reads of `gen_kwargs` (`normalize_gen_kwargs`), and the usual fields of vLLM's SamplingParams,
which gets the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalSettings:
    """What lm-eval's `simple_evaluate` and its vLLM model are given, under their names (0.4.13).

    `apply_chat_template` is a template's name or true for the default one; `fewshot_as_multiturn` counts only
    with a template. `num_fewshot` does not change a task that sets 0 itself. `gen_kwargs` replace those of
    generating tasks, key by key; `max_gen_toks` is the most new tokens where the task sets none. What stands
    before the last `think_end_token` is cut off an answer; `enable_thinking` is handed to the template.
    `batch_size` is how many requests vLLM is given at once.
    """

    num_fewshot: int | None = None
    apply_chat_template: bool | str = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    gen_kwargs: GenKwargs = field(default_factory=dict)
    max_gen_toks: int | None = None
    think_end_token: str | None = None
    enable_thinking: bool | None = None
    batch_size: BatchSize = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """How the results of a verdict were asked for, as lm-eval recorded it.

    `chat_template` and `system_instruction` are SHA-256, shortened to 16 digits; None where there was none.
    `num_fewshot` counts the examples of each task. `generation` has `gen_kwargs`, and of the model's
    arguments those that change an answer.
    """

    chat_template: str | None
    system_instruction: str | None
    num_fewshot: Mapping[str, int]
    fewshot_as_multiturn: bool
    generation: Mapping[str, str]
