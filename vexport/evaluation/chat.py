"""Prompts through a chat template, as vLLM serves them. Used in the worker process only."""

from typing import TYPE_CHECKING

import jinja2

from vexport.errors import InputError
from vexport.types import LmEvalSettings
from vexport.types.patterns import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


class ServedChat:
    """What replaces the chat methods of lm-eval's vLLM model (lm_eval/models/vllm_causallms.py, 0.4.13).

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
            with time_limit(TEMPLATE_SECONDS, "processor"):
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
