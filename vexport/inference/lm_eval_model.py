"""lm-eval's model class for vLLM, around an engine that already stands, or a server. Worker
processes only.

lm-eval's constructor builds its own engine; here it is handed ours, and everything else
(tokenization, stop sequences, chat templates, scoring) stays lm-eval's. Answers are kept one by
one, so that a later call asks only the rest.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jinja2
from pydantic import JsonValue

from vexport.errors import InputError
from vexport.records import Json, LmEvalSettings, OnProgress
from vexport.records.patterns import TEMPLATE_SECONDS, time_limit

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.vllm_causallms import VLLM
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, RequestOutput

ModelArguments = Mapping[str, JsonValue]
Tokens = tuple[tuple[str, str] | None, list[int], list[int]]
"""A prompt and its continuation: the two texts, None for a window of a long one, and their
tokens.
"""

Message = dict[str, str]
_PROGRESS_STEPS = 100
# Batches of this many times the engine's own: fewer leave it idle at the end of each batch, more
# lose as many answers when an evaluation is killed.
_BATCHES = 4
Parameters = object
"""Sampling of a prompt: vLLM's SamplingParams, or a server's parameters by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be continued; or, without `parameters`, one whose tokens from `context` on are
    scored.
    """

    prompt: Sequence[int]
    context: int = 0
    parameters: Parameters = None


class FinishedText(str):
    """A generated text with the engine's reason for ending it, such as `stop` or `length`.

    The reason is empty if it is unknown. lm-eval's lists of answers carry the object on to the
    samples. lm-eval also converts a task's targets to the type of the answers: it calls the type
    with the text alone.
    """

    finish_reason: str

    def __new__(cls, text: str, finish_reason: str = "") -> "FinishedText":
        """Attach the reason to the text."""
        finished = super().__new__(cls, text)
        finished.finish_reason = finish_reason
        return finished

    def __reduce__(self) -> tuple[type["FinishedText"], tuple[str, str]]:
        """Say how a copy is made, of which lm-eval makes some."""
        return FinishedText, (str(self), self.finish_reason)


def kept_text(text: str, finish_reason: str | None) -> Json:
    """Return a generated answer as `KeptAnswers` stores it."""
    return {"text": text, "finish_reason": finish_reason or ""}


def _finished_text(answer: Json) -> FinishedText:
    """Read an answer of `kept_text`, or a bare text, as older versions stored it."""
    if isinstance(answer, dict):
        return FinishedText(str(answer.get("text", "")), str(answer.get("finish_reason", "")))
    return FinishedText(str(answer), "")


class KeptAnswers(dict[str, Json]):
    """Answers by their keys, kept in a file, a line each; in memory alone without one.

    What a killed process left of its last line is cut off.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file
        content = file.read_bytes() if file is not None and file.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if file is not None and len(whole) < len(content):
            os.truncate(file, len(whole))
        for line in whole.splitlines():
            with suppress(ValueError):  # of a file that was not cut before
                self.update(json.loads(line))

    def add(self, answers: Mapping[str, Json]) -> None:
        """Keep answers."""
        self.update(answers)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps({key: answer})}\n" for key, answer in answers.items())


class AskedModel(ABC):
    """The part of `vllm.LLM` that lm-eval's model uses. `progress` is told what is asked, and
    questions answered of all.
    """

    llm_engine: object

    def __init__(self, kept: KeptAnswers, progress: OnProgress) -> None:
        self.kept, self._progress, self._round = kept, progress, 0
        self._stage, self._done, self._total = "", 0, 0

    def expect(self, stage: str, prompts: int) -> None:
        """Announce the number of prompts."""
        self._stage, self._done, self._total = stage, 0, prompts
        self._progress(stage, 0, prompts)

    def count(self, finished: int) -> None:
        """Count answered prompts."""
        before, self._done = self._done, min(self._total, self._done + finished)
        if before * _PROGRESS_STEPS // self._total < self._done * _PROGRESS_STEPS // self._total:
            self._progress(self._stage, self._done, self._total)

    def ask_again(self) -> None:
        """Ignore the kept answers from now on."""
        self._round += 1

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[Parameters],
        use_tqdm: bool,
        lora_request: None,
    ) -> list[SimpleNamespace]:
        """Continue prompts, as `vllm.LLM` does."""
        pairs = zip(prompts, sampling_params, strict=True)
        answers = self.answers(
            [Question(prompt=p["prompt_token_ids"], parameters=s) for p, s in pairs]
        )
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=_finished_text(answer))])
            for answer in answers
        ]

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is the
        likeliest.
        """
        answers = self.answers([Question(prompt=old + new, context=len(old)) for old, new in pairs])
        return [(answer[0], answer[1]) for answer in answers if isinstance(answer, list)]  # type: ignore[misc]

    def answers(self, questions: Sequence[Question]) -> Iterator[Json]:
        """The answers in their order; those that are not kept are asked, the longest first, as by
        lm-eval.
        """
        keys = [self._key(number, question) for number, question in enumerate(questions)]
        asked = dict(zip(keys, questions, strict=True))
        left = sorted(
            (key for key in asked if key not in self.kept), key=lambda key: -len(asked[key].prompt)
        )
        print(
            f"{len(keys) - len(left)} of {len(keys)} answers are kept", flush=True
        )  # into the worker's log
        self.count(len(keys) - len(left))
        if left:
            self.ask({key: asked[key] for key in left})
        return (self.kept[key] for key in keys)

    def _key(self, number: int, question: Question) -> str:
        parameters = question.parameters
        names = getattr(parameters, "__struct_fields__", ())  # of vLLM's SamplingParams
        given = (
            parameters
            if isinstance(parameters, dict)
            else {n: getattr(parameters, n) for n in names}
        )
        sampled = number if given.get("temperature") else None  # the same prompt may come again
        words = repr(
            (self._round, list(question.prompt), question.context, sorted(given.items()), sampled)
        )
        return hashlib.sha256(words.encode()).hexdigest()[:32]

    @abstractmethod
    def ask(self, questions: Mapping[str, Question]) -> None:
        """Ask all questions and keep the answers by their keys: `kept_text`, or what `score`
        gives.
        """

    def require_scores(self) -> None:  # noqa: B027 - an engine has them
        """Raise InputError unless the model gives log-probabilities of prompts."""


class EngineModel(AskedModel):
    """An engine of this process."""

    def __init__(
        self, llm: "LLM", kept: KeptAnswers, progress: OnProgress, batch_size: int | None
    ) -> None:
        super().__init__(kept, progress)
        self._llm, self.llm_engine = llm, llm.llm_engine
        most = int(llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
        self._batch_size = batch_size or _BATCHES * most

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Ask in batches."""
        from lm_eval.models.vllm_causallms import VLLM
        from vllm import SamplingParams, TokensPrompt

        scoring = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
        keys, step = list(questions), self._llm.llm_engine.step

        def counted() -> "list[RequestOutput]":
            outputs: list[RequestOutput] = step()
            self.count(sum(output.finished for output in outputs))
            return outputs

        for first in range(0, len(keys), self._batch_size):
            batch = [questions[key] for key in keys[first : first + self._batch_size]]
            prompts = [TokensPrompt(prompt_token_ids=list(question.prompt)) for question in batch]
            parameters: list[SamplingParams] = [
                question.parameters or scoring for question in batch
            ]
            with replaced(self._llm.llm_engine, "step", counted):
                outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
            answers = [
                kept_text(output.outputs[0].text, output.outputs[0].finish_reason)
                if question.parameters
                else list(VLLM._parse_logprobs(list(question.prompt), output, question.context))
                for question, output in zip(batch, outputs, strict=True)
            ]
            self.kept.add(dict(zip(keys[first:], answers, strict=False)))


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Let `owner.name` be `value` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class ServedChat:
    """The chat methods in the place of those of lm-eval's VLLM (lm_eval/models/vllm_causallms.py,
    0.4.13).

    Where that does otherwise, this follows vLLM. It hands a template `enable_thinking=None` where
    nobody set it, which one that asks whether it is defined takes for false. It ignores a
    template's name. It records the tokenizer's template, though vLLM may prefer a processor's.
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
            raise InputError(
                "chat template", got="none that vLLM finds", need="one, to be applied", fix=fix
            )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that is applied, which lm-eval records."""
        return self.hf_chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, without a task's description where the template has no place for
        one.

        That is lm-eval's way. A system instruction that somebody asked for is never left out:
        InputError.
        """
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except jinja2.TemplateError as error:
            if self.settings.system_instruction is not None:
                got, need = (
                    f"{type(error).__name__}: {error}",
                    "a template that takes a system message",
                )
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
            raise InputError(
                "chat template", got=str(error), need="a template that ends", fix=fix
            ) from error
        return text


def wrap_engine(asked: AskedModel, arguments: ModelArguments, settings: LmEvalSettings) -> "VLLM":
    """lm-eval's VLLM around `asked`; `arguments` are its constructor's.

    InputError where lm-eval would cut a prompt or leave a system instruction out, and where there
    is no chat template to apply.
    """
    from lm_eval.models import vllm_causallms

    class BuiltVLLM(ServedChat, vllm_causallms.VLLM):  # type: ignore[misc]
        requests: Sequence["Instance"] = ()

        def generate_until(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[str]:
            for request, tokens in zip(
                requests, self.tok_encode([r.args[0] for r in requests]), strict=True
            ):
                *_, new = self.modify_gen_kwargs(
                    request.args[1], default_max_gen_toks=self.max_gen_toks
                )
                _require_room(request, len(tokens), new, self.max_length)
            _expect(asked, requests, len(requests))
            with replaced(vllm_causallms, "postprocess_generated_text", processed):
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
            _expect(asked, self.requests, len(requests))
            return asked.score([(context, continuation) for _, context, continuation in requests])

    process = vllm_causallms.postprocess_generated_text

    def processed(text: str, stop: list[str] | str | None, think_end_token: str | None) -> str:
        """Process an answer as lm-eval does, and keep its finish reason.

        With a `think_end_token` lm-eval looks for the stop strings itself, after the answer came:
        an answer that reaches its stop string is whole, even if the engine went on to the longest
        length.
        """
        answer: str = process(text, stop, think_end_token)
        if not isinstance(text, FinishedText):
            return answer
        return FinishedText(answer, text.finish_reason if text.endswith(answer) else "stop")

    with replaced(vllm_causallms, "LLM", lambda **_: asked):
        model = BuiltVLLM(batch_size="auto", **arguments)
    model.choose_template(settings)
    return model


def _expect(asked: AskedModel, requests: Sequence["Instance"], prompts: int) -> None:
    asked.expect(", ".join(dict.fromkeys(str(request.task_name) for request in requests)), prompts)


def _require_room(request: "Instance", prompt: int, new: int, room: int) -> None:
    """lm-eval would cut the prompt and only log it; then the two models might not see the same
    question.
    """
    if prompt + new > room:
        raise InputError(
            f"task {request.task_name}, document {request.doc_id}",
            got=f"a prompt of {prompt} tokens and {new} to generate",
            need=f"at most {room} in all (max_model_len)",
            fix="raise max_model_len, or lower max_gen_toks (256 if the task sets none) or "
            "num_fewshot",
        )
