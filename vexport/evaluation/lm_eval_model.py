"""lm-eval's model class for vLLM, around an engine that already stands. Used in the worker process only.

lm-eval's constructor builds its own engine; here it is handed ours, and everything else (tokenization, stop
sequences, chat templates, scoring) stays lm-eval's.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.evaluation.asked import AskedModel, replaced
from vexport.records import LmEvalSettings
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.vllm_causallms import VLLM
    from transformers import PreTrainedTokenizerBase

ModelArguments = Mapping[str, JsonValue]
Tokens = tuple[tuple[str, str] | None, list[int], list[int]]
"""A prompt and its continuation: the two texts, None for a window of a long one, and their tokens."""

Message = dict[str, str]


class ServedChat:
    """The chat methods in the place of those of lm-eval's vLLM model (lm_eval/models/vllm_causallms.py,
    0.4.13).

    Where that does otherwise, this follows vLLM. It hands a template `enable_thinking=None` where nobody set
    it, which one that asks whether it is defined takes for false. It ignores a template's name. It records
    the tokenizer's template, though vLLM may prefer a processor's.
    """

    tokenizer: "PreTrainedTokenizerBase"
    hf_chat_template: str | None
    enable_thinking: bool | None
    settings: LmEvalSettings

    def choose_template(self, settings: LmEvalSettings) -> None:
        """Apply the template of `settings` from now on; InputError where there is none to apply."""
        self.settings, name = settings, settings.apply_chat_template
        if isinstance(name, str):
            self.hf_chat_template = self.tokenizer.get_chat_template(name)
        if name and not self.hf_chat_template:
            fix = "add one to the tokenizer, or do not apply it (--no-apply-chat-template)"
            raise InputError("chat template", got="none that vLLM finds", need="one, to be applied", fix=fix)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that is applied, which lm-eval records."""
        return self.hf_chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """A conversation as text, without a task's description where the template has no place for one.

        That is lm-eval's way. A system instruction that somebody asked for is never left out: InputError.
        """
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except jinja2.TemplateError as error:
            if self.settings.system_instruction is not None:
                got, need = f"{type(error).__name__}: {error}", "a template that takes a system message"
                fix = "leave the system instruction out, or put it into the tasks' doc_to_text"
                raise InputError("chat template", got=got, need=need, fix=fix) from error
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
            fix = "correct it, or do not apply it (--no-apply-chat-template)"
            raise InputError("chat template", got=str(error), need="a template that ends", fix=fix) from error
        return text


def wrap_engine(asked: AskedModel, arguments: ModelArguments, settings: LmEvalSettings) -> "VLLM":
    """lm-eval's VLLM around `asked`; `arguments` are its constructor's.

    It raises InputError where lm-eval would cut a prompt or leave a system instruction out, and where there
    is no chat template to apply; it reports the tasks' names, requests done and requests in all.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(ServedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        requests: Sequence["Instance"] = ()

        def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
            for request, tokens in zip(requests, self.tok_encode([r.args[0] for r in requests]), strict=True):
                *_, new = self.modify_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks)
                _require_room(request, len(tokens), new, self.max_length)
            asked.expect(requests, len(requests))
            answers: list[str] = super().generate_until(requests, disable_tqdm=True)
            return answers

        def loglikelihood(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            self.requests = requests
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return answers

        def loglikelihood_rolling(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[float]:
            self.requests = requests
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
            return answers

        def _loglikelihood_tokens(
            self, requests: Sequence[Tokens], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            if all(key is not None for key, _, _ in requests):  # windows of a long text always fit
                for request, (_, context, continuation) in zip(self.requests, requests, strict=True):
                    _require_room(request, len(context) + len(continuation), 1, self.max_length)
            asked.expect(self.requests, len(requests))
            return asked.score([(context, continuation) for _, context, continuation in requests])

    with replaced(vllm_causallms, "LLM", lambda **_: asked):
        model = BuiltVLLM(batch_size="auto", **arguments)
    model.choose_template(settings)
    return model


def _require_room(request: "Instance", prompt: int, new: int, room: int) -> None:
    """lm-eval would cut the prompt and only log it; then the two models might not see the same question."""
    if prompt + new > room:
        raise InputError(
            f"task {request.task_name}, document {request.doc_id}",
            got=f"a prompt of {prompt} tokens and {new} to generate",
            need=f"at most {room} in all (max_model_len)",
            fix="raise max_model_len, or lower max_gen_toks (256 if the task sets none) or num_fewshot",
        )
