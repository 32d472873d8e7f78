"""Answers of an engine as they come, in a file: an evaluation that was killed asks only the others again.

Used in the worker process only. A line is a JSON list: key of the request, text, log-probabilities of the
prompt's tokens. The first line says which engine answered: answers of another one are dropped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

FILE = "answers.jsonl"
"""Next to lm-eval's results."""

# For each token of a prompt the log-probabilities of some token ids; vLLM has none for the first token.
PromptLogprobs: TypeAlias = list[dict[int, float] | None]


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A continuation."""

    text: str


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """What lm-eval reads of vLLM's RequestOutput."""

    outputs: tuple[AnswerText, ...]
    prompt_logprobs: PromptLogprobs | None


class Journal:
    """The answers in one file; those of a round (a first and a second time of asking) are its own.

    `identity` names the model, its engine and how they are asked.
    """

    def __init__(self, file: Path, identity: str) -> None:
        self._file = file
        self._answers: dict[str, StoredOutput] = {}
        self.round = 0
        lines = _whole_lines(file)
        if lines and json.loads(lines[0]) == [identity]:
            self._answers = dict(map(parse_answer, lines[1:]))
        else:
            lines = [json.dumps([identity]).encode()]
        # A torn last line is cut: what follows it must begin a line.
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(line + b"\n" for line in lines))

    def __len__(self) -> int:
        return len(self._answers)

    def keys(self, prompts: "Sequence[TokensPrompt]", params: "Sequence[SamplingParams]") -> list[str]:
        """A key for each request; those that are alike are told apart by their number."""
        seen: Counter[str] = Counter()
        keys = []
        for prompt, asked in zip(prompts, params, strict=True):
            text = f"{self.round} {prompt['prompt_token_ids']} {asked!r}"
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            keys.append(f"{digest}-{seen[digest]}")
            seen[digest] += 1
        return keys

    def get(self, key: str) -> StoredOutput | None:
        """The answer that was given, if any."""
        return self._answers.get(key)

    @contextmanager
    def keeping(self) -> Iterator[Callable[[bytes], object]]:
        """What keeps the line of an answer."""
        with self._file.open("ab", buffering=0) as file:
            yield file.write


@contextmanager
def each_answer(llm: "LLM", keys: Sequence[str], keep: Callable[[bytes], object]) -> Iterator[None]:
    """Give `keep` the line of each answer once it is whole, while `llm` answers the requests of `keys`."""
    engine, first = llm.llm_engine, llm.request_counter.counter
    step = engine.step

    def recorded() -> "list[RequestOutput]":
        outputs: list[RequestOutput] = step()
        for output in outputs:
            if output.finished:
                keep(_line(keys[int(output.request_id) - first], output))
        return outputs

    engine.step = recorded
    try:
        yield
    finally:
        engine.step = step


def are_answers_to(file: Path, identity: str) -> bool:
    """Whether a file has answers to the requests of `identity`; which engine gave them, the engine asks."""
    lines = _whole_lines(file)
    return bool(lines) and lines[0].startswith(f'["{identity} '.encode())


def _whole_lines(file: Path) -> list[bytes]:
    """The lines that were written to their end."""
    if not file.is_file():
        return []
    return file.read_bytes().split(b"\n")[:-1]


def _line(key: str, output: "RequestOutput") -> bytes:
    logprobs = None
    if output.prompt_logprobs is not None:
        logprobs = [
            None if token is None else {number: found.logprob for number, found in token.items()}
            for token in output.prompt_logprobs
        ]
    return json.dumps([key, output.outputs[0].text, logprobs]).encode() + b"\n"


def parse_answer(line: bytes) -> tuple[str, StoredOutput]:
    """The key of a request and its answer."""
    key, text, logprobs = json.loads(line)
    if logprobs is not None:
        logprobs = [
            None if token is None else {int(number): value for number, value in token.items()}
            for token in logprobs
        ]
    return key, StoredOutput(outputs=(AnswerText(text),), prompt_logprobs=logprobs)
