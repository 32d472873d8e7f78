"""Wrap a `Model` in lm-eval's model class for vLLM. Only worker processes import this module.

lm-eval's constructor normally builds an engine. Here it receives a `Model` instead. The rest
(tokenization, stop sequences, chat templates, scoring) is lm-eval's code.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jinja2
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.inference.engine_model import require_pictures
from vexport.inference.model import Model, Question, override_attribute
from vexport.inference.shipped.base import Conversation
from vexport.inference.shipped.tool_calls.parser import with_parsed_calls
from vexport.inference.stored_responses import FinishedText, text_with_calls
from vexport.records import Json
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit
from vexport.rules import prompts as rules
from vexport.rules import tools as tool_rules
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
Process = Callable[[str, list[str] | str | None, str | None], str]
"""lm-eval's function that removes a stop text and thinking from a response."""


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
    model_behind: Model
    think_end_token: str | None
    eot_token_id: int
    max_length: int
    max_gen_toks: int
    tok_encode: Callable[[list[str]], list[list[int]]]
    modify_gen_kwargs: Callable[..., tuple[dict[str, Json], list[str], int]]

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

    def ask_conversations(self, requests: Sequence["Instance"]) -> list[FinishedText]:
        """Return the responses to requests with conversations."""
        if not requests:
            return []
        _begin_step(self.model_behind, requests, len(requests))
        asked = [self._question(request) for request in requests]
        # A parser that does not fit the model is an error before the model runs.
        self._finished(*asked[0], FinishedText(""))
        responses = self.model_behind.chat([question for question, _ in asked])
        return [
            self._finished(question, until, response)
            for (question, until), response in zip(asked, responses, strict=True)
        ]

    def _question(self, request: "Instance") -> tuple[Question, list[str]]:
        """Return the question of a request with a conversation, and its stop texts."""
        from lm_eval.models import vllm_causallms

        eos = self.tokenizer.decode(self.eot_token_id)
        given, until, new = self.modify_gen_kwargs(
            request.args[1], eos=eos, default_max_gen_toks=self.max_gen_toks
        )
        # With an end of thinking, the text after a stop text is removed later.
        stops = [eos] if self.think_end_token else until
        prompt: list[int] = []
        options: Mapping[str, Json] = {}
        if self.model_behind.takes_messages:
            given |= self._rendering(request.conversation)
        elif request.conversation.has_pictures:
            require_pictures(self.model_behind.llm_engine.model_config, str(request.task_name))
            options = self._chat_options(request.conversation)
        else:
            (prompt,) = self.tok_encode([self._rendered_conversation(request.conversation)])
            _require_room(request, len(prompt), new, self.max_length)
        parameters = vllm_causallms.SamplingParams(max_tokens=new, stop=stops, **given)
        question = Question(
            prompt=prompt,
            parameters=parameters,
            conversation=request.conversation,
            chat_options=options,
        )
        return question, until

    def _rendering(self, conversation: Conversation) -> Mapping[str, Json]:
        """Return the parameters of the chat API that render a conversation as `_rendered` does."""
        parameters: dict[str, Json] = {}
        if self.enable_thinking is not None:
            parameters["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        if conversation.begins_response:
            parameters |= {"add_generation_prompt": False, "continue_final_message": True}
        return parameters

    def _chat_options(self, conversation: Conversation) -> Mapping[str, Json]:
        """Return how an engine renders pictures, with the same template as `_rendered`."""
        if not self.hf_chat_template:
            raise InputError.of(rules.NO_TEMPLATE, "chat template")
        given: Mapping[str, Json] = {
            "chat_template": self.hf_chat_template,
            "chat_template_kwargs": {},
        }
        return {**given, **self._rendering(conversation)}

    def _rendered_conversation(self, conversation: Conversation) -> str:
        return self._rendered(
            conversation.messages,
            add_generation_prompt=not conversation.begins_response,
            tools=conversation.tools,
        )

    def _finished(
        self, question: Question, until: list[str], response: FinishedText
    ) -> FinishedText:
        """Return a response with the calls in it. A server returns them itself."""
        from lm_eval.models.vllm_causallms import postprocess_generated_text

        text = keep_finish_reason(postprocess_generated_text, response, until, self.think_end_token)
        assert isinstance(text, FinishedText)
        assert question.conversation is not None
        tools = question.conversation.tools
        if self.model_behind.takes_messages or not tools:
            return text_with_calls(text, text.finish_reason, response.calls)
        assert self.settings.tool_call_parser is not None
        return with_parsed_calls(text, self.settings.tool_call_parser, self.tokenizer, tools)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Json]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> str:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        template = self.hf_chat_template
        if tools and not isinstance(self.settings.apply_chat_template, str):
            template = template_for_tools(self.tokenizer) or template
        try:
            with time_limit(TEMPLATE_SECONDS):
                text: str = self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    chat_template=template,
                    tools=[*tools] or None,
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

    process = vllm_causallms.postprocess_generated_text

    class BuiltVLLM(ServedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        requests: Sequence["Instance"] = ()
        model_behind = answering_model

        def generate_until(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[str]:
            """Return the responses. Requests with conversations follow all other requests."""
            chats = [number for number, each in enumerate(requests) if is_chat(each)]
            texts = [number for number, each in enumerate(requests) if not is_chat(each)]
            answers = dict(zip(texts, self._texts([requests[at] for at in texts]), strict=True))
            answers |= zip(
                chats, self.ask_conversations([requests[at] for at in chats]), strict=True
            )
            return [answers[number] for number in range(len(requests))]

        def _texts(self, requests: list["Instance"]) -> list[str]:
            if not requests:
                return []
            prompts = self.tok_encode([request.args[0] for request in requests])
            for request, tokens in zip(requests, prompts, strict=True):
                *_, new = self.modify_gen_kwargs(
                    request.args[1], default_max_gen_toks=self.max_gen_toks
                )
                _require_room(request, len(tokens), new, self.max_length)
            _begin_step(answering_model, requests, len(requests))
            keeping = partial(keep_finish_reason, process)
            with override_attribute(vllm_causallms, "postprocess_generated_text", keeping):
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

    with override_attribute(vllm_causallms, "LLM", lambda **_: answering_model):
        model = BuiltVLLM(batch_size="auto", **arguments)
    model.choose_template(settings)
    return model


def keep_finish_reason(
    process: Process, text: str, stop: list[str] | str | None, think_end_token: str | None
) -> str:
    """Process a response as lm-eval does, by `process`, and keep its finish reason.

    With a `think_end_token`, lm-eval removes the text after a stop string only after generation. A
    response with a stop string is therefore complete, even if the engine reached the length limit.
    Its finish reason becomes "stop".
    """
    answer = process(text, stop, think_end_token)
    if not isinstance(text, FinishedText):
        return answer
    return FinishedText(answer, text.finish_reason if text.endswith(answer) else "stop")


def is_chat(request: "Instance") -> bool:
    """Return True if a request has a conversation in the place of a prompt."""
    return hasattr(request, "conversation")


def template_for_tools(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the template for conversations with tools, if the tokenizer has several templates."""
    templates = tokenizer.chat_template
    return templates.get("tool_use") if isinstance(templates, dict) else None


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
        if is_chat(request) and request.conversation.tools:
            raise InputError.of(tool_rules.TOO_LONG, where, prompt=prompt, new=new, reason=reason)
        raise InputError.of(rules.TOO_LONG, where, prompt=prompt, new=new, reason=reason)
