"""lm-eval's model class for vLLM, around an engine that already stands. Used in the worker process only.

lm-eval's constructor builds its own engine; here it is handed ours, and everything else (tokenization, stop
sequences, chat templates, scoring) stays lm-eval's.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from pydantic import JsonValue

from vexport.errors import InputError
from vexport.evaluation.chat import ServedChat
from vexport.evaluation.journal import Journal, StoredOutput, parse_answer
from vexport.evaluation.replicas import Engines, Question
from vexport.types import LmEvalSettings, OnProgress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.vllm_causallms import VLLM
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

ModelArguments = Mapping[str, JsonValue]

Answer = TypeVar("Answer")

_PROGRESS_STEPS = 100
_ORDER_SEED = 0


class ReportedChat(ServedChat):
    """Says which tasks it is asked about.

    `requests` are those whose log-likelihoods are asked for, in the order of their tokens.
    """

    model: "_ReportingLLM"
    requests: Sequence["Instance"] = ()

    def answered(
        self,
        requests: list["Instance"],
        ask: Callable[..., list[Answer]],
        prepare: Callable[[list["Instance"]], None] = lambda requests: None,
    ) -> list[Answer]:
        """Answers to all requests, which are prepared first."""
        self.model.stage = ", ".join(dict.fromkeys(str(request.task_name) for request in requests))
        prepare(requests)
        answers = ask(requests, disable_tqdm=True)
        self.requests = ()
        return answers

    def _note_requests(self, requests: list["Instance"]) -> None:
        self.requests = requests


def wrap_engine(
    engines: Engines,
    arguments: ModelArguments,
    settings: LmEvalSettings,
    progress: OnProgress,
    journal: Journal,
) -> "VLLM":
    """lm-eval's VLLM around `engines`; `arguments` are its constructor's, `journal` has and keeps answers.

    It raises InputError where lm-eval would cut a prompt or leave a system instruction out, and where there
    is no chat template to apply; it reports the tasks' names, requests done and requests in all.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(ReportedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
            return self.answered(requests, super().generate_until, self._require_room_to_generate)

        def loglikelihood(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return self.answered(requests, super().loglikelihood, self._note_requests)

        def loglikelihood_rolling(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[float]:
            return self.answered(requests, super().loglikelihood_rolling)

        def _require_room_to_generate(self, requests: list["Instance"]) -> None:
            for request, tokens in zip(requests, self.tok_encode([r.args[0] for r in requests]), strict=True):
                *_, new = self.modify_gen_kwargs(request.args[1], default_max_gen_toks=self.max_gen_toks)
                _require_room(request, len(tokens), new, self.max_length)

        def _loglikelihood_tokens(
            self,
            requests: list[tuple[tuple[str, str], list[int], list[int]]],
            disable_tqdm: bool = False,
        ) -> list[tuple[float, bool]]:
            for request, (_, context, continuation) in zip(self.requests, requests, strict=False):
                _require_room(request, len(context) + len(continuation), 1, self.max_length)
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm=True)
            return answers

    with replaced(vllm_causallms, "LLM", lambda **_: _ReportingLLM(engines, progress, journal)):
        model = BuiltVLLM(batch_size=settings.batch_size, **arguments)
    model.choose_template(settings)
    return model


class _ReportingLLM:
    """What lm-eval uses of `vllm.LLM`, with progress going to `progress` instead of a terminal.

    What `journal` has is not asked. The rest is asked in a random order: lm-eval sorts requests by length,
    the longest first, and what is left of the time would be overestimated by far.
    """

    def __init__(self, engines: Engines, progress: OnProgress, journal: Journal) -> None:
        self._engines, self._progress, self._journal = engines, progress, journal
        self.llm_engine = engines.llm.llm_engine
        self.stage = ""

    def begin_round(self) -> None:
        """Ask again what has an answer already."""
        self._journal.round += 1

    def generate(
        self,
        prompts: Sequence["TokensPrompt"],
        sampling_params: Sequence["SamplingParams"],
        use_tqdm: bool,
        lora_request: "LoRARequest | None",
    ) -> Sequence[StoredOutput]:
        assert lora_request is None, "models are served as they are"
        keys = self._journal.keys(prompts, sampling_params)
        answers = {key: answer for key in keys if (answer := self._journal.get(key))}
        asked = [
            Question(*question)
            for question in zip(keys, prompts, sampling_params, strict=True)
            if question[0] not in answers
        ]
        random.Random(_ORDER_SEED).shuffle(asked)
        step, lock = max(1, len(asked) // _PROGRESS_STEPS), Lock()
        with self._journal.keeping() as keep:

            def answered(line: bytes) -> None:
                key, answer = parse_answer(line)
                with lock:
                    keep(line)
                    answers[key] = answer
                    left = len(keys) - len(answers)
                    if left % step == 0:
                        self._progress(self.stage, len(answers), len(keys))

            self._engines.ask(asked, answered)
        return [answers[key] for key in keys]


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
