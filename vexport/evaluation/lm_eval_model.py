"""lm-eval's model class for vLLM, around an engine that already stands. Used in the worker process only.

lm-eval's constructor builds its own engine; here it is handed ours, and everything else (tokenization, stop
sequences, chat templates, scoring) stays lm-eval's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import jinja2
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.types import LmEvalSettings, OnProgress
from vexport.types.patterns import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook
    from lm_eval.models.vllm_causallms import VLLM
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest


ModelArguments = Mapping[str, JsonValue]
Tokens = tuple[tuple[str, str] | None, list[int], list[int]]
"""A prompt and its continuation: the two texts, None for a window of a long one, and their tokens."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_PROGRESS_STEPS = 100
# Of what the engine works on at once: few, and it idles at the end of each batch; many, and a killed
# evaluation loses as many answers.
_BATCHES = 4
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


class AskedModel(Protocol):
    """The part of `vllm.LLM` that lm-eval's model uses, and what it is told besides.

    `at_once` is the number of prompts that are worked on at once.
    """

    llm_engine: object
    at_once: int

    def generate(
        self,
        prompts: Sequence["TokensPrompt"],
        sampling_params: Sequence["SamplingParams"],
        use_tqdm: bool,
        lora_request: "LoRARequest | None",
    ) -> "list[RequestOutput]":
        """Answer prompts."""

    def expect(self, requests: Sequence["Instance"], prompts: int) -> None:
        """So many prompts will come, for these requests."""

    def ask_again(self) -> None:
        """From now on ask what was answered before, too."""

    def require_scores(self) -> None:
        """InputError unless log-probabilities of prompts can be had."""


class BatchedChat(ServedChat):
    """Asks in batches, whose answers are in lm-eval's cache before the next is asked, and reports progress.

    `requests` are those whose log-likelihoods are asked for, in the order of their tokens.
    """

    model: AskedModel
    max_length: int
    cache_hook: "CacheHook"
    requests: Sequence["Instance"] = ()

    def in_batches(
        self, requests: Sequence[Asked], ask: Callable[[list[Asked]], list[Answer]]
    ) -> list[Answer]:
        """Answers to all requests."""
        chosen, answers = self.settings.batch_size, list[Answer]()
        size = chosen if isinstance(chosen, int) else _BATCHES * self.model.at_once
        for first in range(0, len(requests), size):
            answers += ask(list(requests[first : first + size]))
            if self.cache_hook.dbdict is not None:
                self.cache_hook.dbdict.commit()
        return answers

    def stored(self, requests: Sequence["Instance"], answers: list[str]) -> list[str]:
        """Generated answers, kept under what lm-eval looks up: it keeps them under completed arguments."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def require_room_to_score(self, requests: Sequence[Tokens]) -> None:
        """InputError where a prompt with its continuation is too long; windows of a long text always fit."""
        if any(key is None for key, _, _ in requests):
            return
        for request, (_, context, continuation) in zip(self.requests, requests, strict=True):
            _require_room(request, len(context) + len(continuation), 1, self.max_length)


def wrap_engine(asked: AskedModel, arguments: ModelArguments, settings: LmEvalSettings) -> "VLLM":
    """lm-eval's VLLM around `asked`; `arguments` are its constructor's.

    It raises InputError where lm-eval would cut a prompt or leave a system instruction out, and where there
    is no chat template to apply; it reports the tasks' names, requests done and requests in all.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(BatchedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
            self._require_room_to_generate(requests)
            self.model.expect(requests, len(requests))
            generate = super().generate_until

            def ask(batch: list["Instance"]) -> list[str]:
                return self.stored(batch, generate(batch, disable_tqdm=True))

            return self.in_batches(requests, ask)

        def loglikelihood(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            self.requests = requests
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return answers

        def loglikelihood_rolling(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[float]:
            score = super().loglikelihood_rolling

            def ask(batch: list["Instance"]) -> list[float]:
                self.requests = batch
                answers: list[float] = score(batch, disable_tqdm=True)
                return answers

            return self.in_batches(requests, ask)

        def _require_room_to_generate(self, requests: list["Instance"]) -> None:
            for request, tokens in zip(requests, self.tok_encode([r.args[0] for r in requests]), strict=True):
                *_, new = self.modify_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks)
                _require_room(request, len(tokens), new, self.max_length)

        def _loglikelihood_tokens(
            self,
            requests: Sequence[Tokens],
            disable_tqdm: bool = False,
        ) -> list[tuple[float, bool]]:
            self.require_room_to_score(requests)
            self.model.expect(self.requests, len(requests))
            score = super()._loglikelihood_tokens
            return self.in_batches(requests, lambda batch: score(batch, disable_tqdm=True))

    with replaced(vllm_causallms, "LLM", lambda **_: asked):
        model = BuiltVLLM(batch_size=settings.batch_size, **arguments)
    model.choose_template(settings)
    return model


class Reporting:
    """Tells `progress` the tasks' names, requests done and requests in all."""

    def __init__(self, progress: OnProgress) -> None:
        self._progress = progress
        self._stage, self._done, self._total = "", 0, 0

    def expect(self, requests: Sequence["Instance"], prompts: int) -> None:
        """So many prompts will come, for these requests."""
        self.expect_of(", ".join(dict.fromkeys(str(request.task_name) for request in requests)), prompts)

    def expect_of(self, stage: str, prompts: int) -> None:
        """The same of what is no task."""
        self._stage, self._done, self._total = stage, 0, prompts
        self._progress(stage, 0, prompts)

    def count(self, finished: int) -> None:
        """So many more are answered."""
        before, self._done = self._done, self._done + finished
        if before * _PROGRESS_STEPS // self._total < self._done * _PROGRESS_STEPS // self._total:
            self._progress(self._stage, self._done, self._total)


class ReportingLLM(Reporting):
    """An engine of this process; lm-eval's cache, which keeps its answers, is not asked again."""

    def __init__(self, llm: "LLM", progress: OnProgress) -> None:
        super().__init__(progress)
        self._llm, self.llm_engine = llm, llm.llm_engine
        self.at_once = int(self.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    def ask_again(self) -> None:
        """Nothing to do."""

    def require_scores(self) -> None:
        """Nothing to do: an engine has them."""

    def generate(
        self,
        prompts: Sequence["TokensPrompt"],
        sampling_params: Sequence["SamplingParams"],
        use_tqdm: bool,
        lora_request: "LoRARequest | None",
    ) -> "list[RequestOutput]":
        assert lora_request is None, "models are served as they are"
        step = self.llm_engine.step

        def counted() -> "list[RequestOutput]":
            outputs: list[RequestOutput] = step()
            self.count(sum(output.finished for output in outputs))
            return outputs

        with replaced(self.llm_engine, "step", counted):
            answers: list[RequestOutput] = self._llm.generate(prompts, sampling_params, use_tqdm=False)
        return answers


def _require_room(request: "Instance", prompt: int, new: int, room: int) -> None:
    """lm-eval would cut the prompt and only log it; then the two models might not see the same question."""
    if prompt + new > room:
        raise InputError(
            f"task {request.task_name}, document {request.doc_id}",
            got=f"a prompt of {prompt} tokens and {new} to generate",
            need=f"at most {room} in all (max_model_len)",
            fix="raise max_model_len, or lower max_gen_toks (256 if the task sets none) or num_fewshot",
        )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Let `owner.name` be `value` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
