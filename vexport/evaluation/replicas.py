"""More engines of one model, each on its own devices, that answer a part of what lm-eval asks.

vLLM's offline engine runs no replicas: each is a process, `python -m vexport.evaluation.replicas REQUESTS
ANSWERS`, with two descriptors. A line of JSON tells it how to start its engine, each further line is a list
of questions, and a line goes back for each answer. Used in the worker process only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

from vexport.engine.messages import SessionRequest
from vexport.engine.worker import build_engine, end_at_crashes, end_with_parent
from vexport.evaluation.journal import each_answer
from vexport.scenario.serve import EngineArguments

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams, TokensPrompt

Keep = Callable[[bytes], object]
"""Takes the line of an answer (`vexport.evaluation.journal`)."""


class Question(NamedTuple):
    """A prompt, how it is continued, and the key of the answer."""

    key: str
    prompt: "TokensPrompt"
    sampling: "SamplingParams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Another process with an engine; it may still be loading the model."""

    number: int
    process: "subprocess.Popen[bytes]"
    requests: IO[bytes]
    answers: IO[bytes]

    def ask(self, questions: Sequence[Question], keep: Keep) -> None:
        """Give each answer to `keep` as it comes. RuntimeError where the engine ends before."""
        import msgspec

        asked = [
            (key, prompt["prompt_token_ids"], msgspec.to_builtins(params))
            for key, prompt, params in questions
        ]
        try:
            self.requests.write(json.dumps(asked).encode() + b"\n")
            self.requests.flush()
            for _ in questions:
                if not (line := self.answers.readline()).endswith(b"\n"):
                    raise BrokenPipeError
                keep(line)
        except BrokenPipeError:
            raise RuntimeError(
                f"replica {self.number} of the engine ended, exit code {self.process.wait()}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """An engine in this process, and its replicas."""

    llm: "LLM"
    replicas: Sequence[Replica] = ()

    def ask(self, questions: Sequence[Question], keep: Keep) -> None:
        """Have every engine answer an equal part; `keep` is called from several threads.

        What one engine raises ends the others.
        """
        count = 1 + len(self.replicas)
        own, *parts = (questions[first::count] for first in range(count))
        with ThreadPoolExecutor(count) as threads:
            others = [
                threads.submit(replica.ask, part, keep)
                for replica, part in zip(self.replicas, parts, strict=True)
            ]

            def keep_own(line: bytes) -> None:
                keep(line)
                for other in others:
                    if other.done():
                        other.result()

            try:
                ask_engine(self.llm, own, keep_own)
                for other in others:
                    other.result()
            except BaseException:
                for replica in self.replicas:
                    replica.process.kill()
                raise


def ask_engine(llm: "LLM", questions: Sequence[Question], keep: Keep) -> None:
    """Give each answer to `keep` as it comes."""
    if not questions:
        return
    with each_answer(llm, [question.key for question in questions], keep):
        prompts = [question.prompt for question in questions]
        llm.generate(prompts, [question.sampling for question in questions], use_tqdm=False)


@contextmanager
def started_replicas(request: SessionRequest, arguments: EngineArguments) -> Iterator[Sequence[Replica]]:
    """The further engines of a session, started with the arguments of the first; they load from now on."""
    with ExitStack() as running:
        yield [
            running.enter_context(_started(number, arguments, _environment(number, arguments)))
            for number in range(1, request.replicas)
        ]


@contextmanager
def _started(number: int, arguments: EngineArguments, environment: dict[str, str]) -> Iterator[Replica]:
    (theirs, requests), (answers, sink) = os.pipe(), os.pipe()
    with os.fdopen(requests, "wb") as requests_file, os.fdopen(answers, "rb") as answers_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vexport.evaluation.replicas", str(theirs), str(sink)],
            stdin=subprocess.PIPE,  # it closes when we die, however that is
            env=environment,
            pass_fds=(theirs, sink),
        )
        try:
            os.close(theirs)
            os.close(sink)
            requests_file.write(json.dumps(arguments).encode() + b"\n")
            requests_file.flush()
            yield Replica(number=number, process=process, requests=requests_file, answers=answers_file)
        finally:
            process.kill()
            process.wait()


def _environment(number: int, arguments: EngineArguments) -> dict[str, str]:
    """Ours, with the devices of a replica: as many as the first engine has, after those of the others."""
    from vllm.platforms import current_platform

    variable = current_platform.device_control_env_var
    if current_platform.is_cpu() or not variable:
        return dict(os.environ)
    visible = os.environ.get(variable) or ",".join(map(str, range(current_platform.device_count())))
    return {**os.environ, variable: ",".join(devices_of(number, visible.split(","), arguments))}


def devices_of(number: int, visible: Sequence[str], arguments: EngineArguments) -> Sequence[str]:
    """The devices of a replica among those that are visible; replica 0 has the first."""
    each = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = arguments.get(name)
        each *= size if isinstance(size, int) else 1
    return visible[number * each : (number + 1) * each]


def main(arguments: list[str]) -> int:
    """Start an engine and answer until the requests end."""
    import msgspec
    from vllm import SamplingParams, TokensPrompt
    from vllm.platforms import current_platform

    requests, answers = map(int, arguments)
    end_with_parent()
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb", buffering=0) as sink:
        llm = build_engine(json.loads(lines.readline()), str(current_platform.device_type))
        end_at_crashes()
        for line in lines:
            questions = [
                Question(
                    key=key,
                    prompt=TokensPrompt(prompt_token_ids=tokens),
                    sampling=msgspec.convert(params, SamplingParams),
                )
                for key, tokens, params in json.loads(line)
            ]
            ask_engine(llm, questions, sink.write)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
