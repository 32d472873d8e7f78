"""lm-eval's model class for vLLM, around an engine that already stands. Used in the worker process only.

lm-eval's constructor builds an engine of its own; here it is handed ours, and everything else
(tokenization, stop sequences, chat templates, scoring) stays lm-eval's.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import JsonValue

from vexport.errors import InputError
from vexport.evaluation.chat import ServedChat
from vexport.types import LmEvalSettings, OnProgress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.vllm_causallms import VLLM
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

ModelArguments = Mapping[str, JsonValue]

Memory = dict[str, object]
"""Answers that were given already, by request; where one model is asked again about the same documents."""
Answer = TypeVar("Answer")

_PROGRESS_STEPS = 100


def wrap_engine(
    llm: "LLM", arguments: ModelArguments, settings: LmEvalSettings, progress: OnProgress
) -> "VLLM":
    """lm-eval's VLLM around `llm`; `arguments` are its constructor's.

    It raises InputError where lm-eval would cut a prompt or leave a system instruction out, and where there
    is no chat template to apply; it reports the tasks' names, requests done and requests in all.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(ServedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        _asked: Sequence["Instance"] = ()
        remembered: Memory | None = None

        def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
            return _recall(self.remembered, requests, self._generate_until)

        def _generate_until(self, requests: list["Instance"]) -> list[str]:
            for request, tokens in zip(requests, self.tok_encode([r.args[0] for r in requests]), strict=True):
                *_, new = self.modify_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks)
                _require_room(request, len(tokens), new, self.max_length)
            self.model.stage = _stage(requests)
            answers: list[str] = super().generate_until(requests, disable_tqdm=True)
            return answers

        def loglikelihood(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return _recall(self.remembered, requests, self._loglikelihood)

        def _loglikelihood(self, requests: list["Instance"]) -> list[tuple[float, bool]]:
            self.model.stage, self._asked = _stage(requests), requests
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            self._asked = ()
            return answers

        def loglikelihood_rolling(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[float]:
            return _recall(self.remembered, requests, self._loglikelihood_rolling)

        def _loglikelihood_rolling(self, requests: list["Instance"]) -> list[float]:
            self.model.stage = _stage(requests)
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
            return answers

        def _loglikelihood_tokens(
            self,
            requests: list[tuple[tuple[str, str], list[int], list[int]]],
            disable_tqdm: bool = False,
        ) -> list[tuple[float, bool]]:
            for request, (_, context, continuation) in zip(self._asked, requests, strict=False):
                _require_room(request, len(context) + len(continuation), 1, self.max_length)
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm=True)
            return answers

    with replaced(vllm_causallms, "LLM", lambda **_: _ReportingLLM(llm, progress)):
        model = BuiltVLLM(batch_size=settings.batch_size, **arguments)
    model.choose_template(settings)
    return model


def _recall(
    memory: Memory | None, requests: list["Instance"], answer: Callable[[list["Instance"]], list[Answer]]
) -> list[Answer]:
    """Answers to all requests, of which only the new ones are asked; `memory` has the others."""
    if memory is None:
        return answer(requests)
    keys = [f"{request.request_type} {request.args!r}" for request in requests]
    new = {key: request for key, request in zip(keys, requests, strict=True) if key not in memory}
    if new:
        memory.update(zip(new, answer(list(new.values())), strict=True))
    return [cast(Answer, memory[key]) for key in keys]


class _ReportingLLM:
    """What lm-eval uses of `vllm.LLM`, with progress going to `progress` instead of a terminal."""

    def __init__(self, llm: "LLM", progress: OnProgress) -> None:
        self._llm, self._progress = llm, progress
        self.llm_engine = llm.llm_engine
        self.stage = ""

    def generate(
        self,
        prompts: Sequence["TokensPrompt"],
        sampling_params: Sequence["SamplingParams"],
        use_tqdm: bool,
        lora_request: "LoRARequest | None",
    ) -> list["RequestOutput"]:
        outputs: list[RequestOutput] = self._llm.generate(
            prompts, sampling_params, use_tqdm=self._bar, lora_request=lora_request
        )
        return outputs

    def _bar(self, *args: object, **options: object) -> object:
        """A tqdm that draws nothing. vLLM makes one around the prompts to render, and one to run them."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        stage, progress = self.stage, self._progress

        class Bar(tqdm):  # type: ignore[misc]
            def update(self, n: float | None = 1) -> bool | None:
                drawn: bool | None = super().update(n)
                if self.iterable is None and (
                    self.n == self.total or self.n % max(1, self.total // _PROGRESS_STEPS) == 0
                ):
                    progress(stage, int(self.n), int(self.total))
                return drawn

        return Bar(*args, **{**options, "file": io.StringIO()})


def _stage(requests: Sequence["Instance"]) -> str:
    return ", ".join(dict.fromkeys(str(request.task_name) for request in requests))


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
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Let `module.name` be `value` inside the block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
