"""Wrap a `Model` in lm-eval's model class for vLLM. Only worker processes import this module.

lm-eval's constructor normally builds an engine. Here it receives a `Model` instead. The rest
(tokenization, stop sequences, chat templates, scoring) is lm-eval's code.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.inference.model import Model, override_attribute
from vexport.inference.stored_responses import FinishedText
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit
from vexport.rules import prompts as rules
from vexport.scenario.evaluate import LmEvalSettings

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.vllm_causallms import VLLM
    from transformers import PreTrainedTokenizerBase

ModelArguments = Mapping[str, JsonValue]
Tokens = tuple[tuple[str, str] | None, list[int], list[int]]
"""A prompt and its continuation: a pair of texts, the prompt's tokens, the continuation's tokens.

The pair of texts is None for a window of a long text.
"""

Message = dict[str, str]


class ServedChat:
    """Chat methods that replace those of lm-eval's VLLM (lm_eval/models/vllm_causallms.py, 0.4.13).

    These methods do the same as vLLM. lm-eval's methods differ from vLLM in three ways:

    - They pass `enable_thinking=None` to the template if the setting is not given. A template that
      tests whether the variable is defined then treats None as false.
    - They ignore the name of a template.
    - They record the tokenizer's template, although vLLM may use the template of a processor.
    """

    tokenizer: "PreTrainedTokenizerBase"
    hf_chat_template: str | None
    enable_thinking: bool | None
    settings: LmEvalSettings

    def choose_template(self, settings: LmEvalSettings) -> None:
        """Use the chat template of `settings`. Raise InputError if the model has no template."""
        self.settings = settings
        name = settings.apply_chat_template
        if isinstance(name, str):
            self.hf_chat_template = self.tokenizer.get_chat_template(name)
        if name and not self.hf_chat_template:
            raise InputError.of(rules.NO_TEMPLATE, "chat template")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template in use, which lm-eval records."""
        return self.hf_chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as text.

        If the template does not support system messages, a task's description is omitted, as in
        lm-eval. If the user gave a system instruction, InputError is raised instead.
        """
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except jinja2.TemplateError as error:
            if self.settings.system_instruction is not None:
                reason = f"{type(error).__name__}: {error}"
                raise InputError.of(rules.TEMPLATE, "chat template", reason=reason) from error
            others = [message for message in chat_history if message["role"] != "system"]
            return self._rendered(others, add_generation_prompt)

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        try:
            with time_limit(TEMPLATE_SECONDS):
                text: str = self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    chat_template=self.hf_chat_template,
                    **thinking,
                )
        except TimeoutError as error:
            raise InputError.of(rules.TEMPLATE, "chat template", reason=str(error)) from error
        return text


def wrap_model(
    answering_model: Model, arguments: ModelArguments, settings: LmEvalSettings
) -> "VLLM":
    """Return lm-eval's VLLM that runs `answering_model`. `arguments` go to lm-eval's constructor.

    Raises InputError if there is no chat template to apply. Later, the returned model raises
    InputError if lm-eval would cut a prompt or leave a system instruction out.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(ServedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        requests: Sequence["Instance"] = ()

        def generate_until(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[str]:
            prompts = self.tok_encode([request.args[0] for request in requests])
            for request, tokens in zip(requests, prompts, strict=True):
                *_, new = self.modify_gen_kwargs(
                    request.args[1], default_max_gen_toks=self.max_gen_toks
                )
                _require_room(request, len(tokens), new, self.max_length)
            _begin_step(answering_model, requests, len(requests))
            with override_attribute(vllm_causallms, "postprocess_generated_text", processed):
                answers: list[str] = super().generate_until(requests, disable_tqdm=True)
            return answers

        def loglikelihood(
            self, requests: list["Instance"], **options: object
        ) -> list[tuple[float, bool]]:
            self.requests = requests
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return answers

        def loglikelihood_rolling(
            self, requests: list["Instance"], **options: object
        ) -> list[float]:
            self.requests = requests
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
            return answers

        def _loglikelihood_tokens(
            self, requests: Sequence[Tokens], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            if all(key is not None for key, _, _ in requests):  # windows of a long text always fit
                for request, (_, context, continuation) in zip(
                    self.requests, requests, strict=True
                ):
                    _require_room(request, len(context) + len(continuation), 1, self.max_length)
            _begin_step(answering_model, self.requests, len(requests))
            return answering_model.score(
                [(context, continuation) for _, context, continuation in requests]
            )

    process = vllm_causallms.postprocess_generated_text

    def processed(text: str, stop: list[str] | str | None, think_end_token: str | None) -> str:
        """Process a response as lm-eval does, and keep its finish reason.

        With a `think_end_token`, lm-eval removes the text after a stop string only after
        generation. A response with a stop string is therefore complete, even if the engine reached
        the length limit. Its finish reason becomes "stop".
        """
        answer: str = process(text, stop, think_end_token)
        if not isinstance(text, FinishedText):
            return answer
        return FinishedText(answer, text.finish_reason if text.endswith(answer) else "stop")

    with override_attribute(vllm_causallms, "LLM", lambda **_: answering_model):
        model = BuiltVLLM(batch_size="auto", **arguments)
    model.choose_template(settings)
    return model


def _begin_step(answering_model: Model, requests: Sequence["Instance"], prompts: int) -> None:
    names = dict.fromkeys(str(request.task_name) for request in requests)
    answering_model.begin_step(", ".join(names), prompts)


def _require_room(request: "Instance", prompt: int, new: int, room: int) -> None:
    """Raise InputError if a prompt and the new tokens exceed the longest sequence.

    lm-eval would truncate the prompt and only log a warning. The two models might then get
    different prompts.
    """
    if prompt + new > room:
        where = f"task {request.task_name}, document {request.doc_id}"
        reason = f"max_model_len is {room}"
        raise InputError.of(rules.TOO_LONG, where, prompt=prompt, new=new, reason=reason)
