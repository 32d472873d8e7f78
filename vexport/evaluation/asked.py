"""What lm-eval's model asks: an engine or a server, whose answers are kept one by one.

A later call asks only what is not kept. Used in worker processes only.
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

from vexport.records import Json, OnProgress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from vllm import LLM, RequestOutput

_PROGRESS_STEPS = 100
# Of what an engine works on at once: few, and it idles at the end of each batch; many, and a killed
# evaluation loses as many answers.
_BATCHES = 4
Parameters = object
"""How a prompt is to be continued: vLLM's SamplingParams, or a server's parameters by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be continued; or, without `parameters`, one whose tokens from `context` on are scored."""

    prompt: Sequence[int]
    context: int = 0
    parameters: Parameters = None


class KeptAnswers:
    """Answers in a file, a line each; in memory alone without one.

    What a killed process left of its last line is cut off.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._answers = file, dict[str, Json]()
        if file is None or not file.is_file():
            return
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
        for line in whole.splitlines():
            with suppress(ValueError):  # of a file that was not cut before
                self._answers.update(json.loads(line))

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Json:
        return self._answers[key]

    def add(self, answers: Mapping[str, Json]) -> None:
        """Keep answers."""
        self._answers.update(answers)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps({key: answer})}\n" for key, answer in answers.items())


class AskedModel(ABC):
    """The part of `vllm.LLM` that lm-eval's model uses. `progress` is told the tasks' names, and questions
    answered of all.
    """

    llm_engine: object

    def __init__(self, kept: KeptAnswers, progress: OnProgress) -> None:
        self.kept, self._progress, self._round = kept, progress, 0
        self._stage, self._done, self._total = "", 0, 0

    def expect(self, requests: "Sequence[Instance]", prompts: int) -> None:
        """So many prompts will come, for these requests."""
        self.expect_of(", ".join(dict.fromkeys(str(request.task_name) for request in requests)), prompts)

    def expect_of(self, stage: str, prompts: int) -> None:
        """The same of what is no task."""
        self._stage, self._done, self._total = stage, 0, prompts
        self._progress(stage, 0, prompts)

    def count(self, finished: int) -> None:
        """So many more are answered."""
        before, self._done = self._done, min(self._total, self._done + finished)
        if before * _PROGRESS_STEPS // self._total < self._done * _PROGRESS_STEPS // self._total:
            self._progress(self._stage, self._done, self._total)

    def ask_again(self) -> None:
        """From now on ask what was answered before, too."""
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
        answers = self.answers([Question(prompt=p["prompt_token_ids"], parameters=s) for p, s in pairs])
        return [SimpleNamespace(outputs=[SimpleNamespace(text=str(answer))]) for answer in answers]

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is the likeliest."""
        answers = self.answers([Question(prompt=old + new, context=len(old)) for old, new in pairs])
        return [(answer[0], answer[1]) for answer in answers if isinstance(answer, list)]  # type: ignore[misc]

    def answers(self, questions: Sequence[Question]) -> Iterator[Json]:
        """The answers in their order; those that are not kept are asked, the longest first, as by lm-eval."""
        keys = [self._key(number, question) for number, question in enumerate(questions)]
        asked = dict(zip(keys, questions, strict=True))
        left = sorted((key for key in asked if key not in self.kept), key=lambda key: -len(asked[key].prompt))
        print(f"{len(keys) - len(left)} of {len(keys)} answers are kept", flush=True)  # into the worker's log
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
            else {name: getattr(parameters, name) for name in names}
        )
        sampled = number if given.get("temperature") else None  # the same prompt may come again
        words = repr((self._round, list(question.prompt), question.context, sorted(given.items()), sampled))
        return hashlib.sha256(words.encode()).hexdigest()[:32]

    @abstractmethod
    def ask(self, questions: Mapping[str, Question]) -> None:
        """Ask all of these and keep the answers by their keys: a text, or what `score` gives."""

    @abstractmethod
    def require_scores(self) -> None:
        """InputError unless log-probabilities of prompts can be had."""


class EngineModel(AskedModel):
    """An engine of this process."""

    def __init__(self, llm: "LLM", kept: KeptAnswers, progress: OnProgress, batch_size: int | None) -> None:
        super().__init__(kept, progress)
        self._llm, self.llm_engine = llm, llm.llm_engine
        most = int(llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
        self._batch_size = batch_size or _BATCHES * most

    def require_scores(self) -> None:
        """An engine has them."""

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
            parameters: list[SamplingParams] = [question.parameters or scoring for question in batch]
            with replaced(self._llm.llm_engine, "step", counted):
                outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
            answers = [
                output.outputs[0].text
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
