"""`python -m vexport.evaluation.endpoint_worker REQUEST RESULT`: lm-eval asks the model behind an address.

lm-eval's vLLM model asks, as it asks an engine of ours: the prompts are the same token ids. Its API models
cut prompts, leave out the first token that a tokenizer adds, and end answers by other rules.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from pydantic import JsonValue
from safetensors.torch import save_file

from vexport.engine.messages import ANSWERS, SessionRequest, SessionResult
from vexport.engine.prompts import KL_TOKENS
from vexport.engine.worker import answer_request, input_problem, reporter
from vexport.errors import InputError, VexportError
from vexport.evaluation.endpoint import Position, Server, UnreachableError
from vexport.evaluation.fingerprint import MODEL, TEMPLATE, Fingerprint, template_of, write_fingerprint
from vexport.evaluation.lm_eval_environment import vllm_distribution
from vexport.evaluation.lm_eval_model import Reporting, replaced
from vexport.evaluation.lm_eval_runner import ask_tasks
from vexport.files import atomic_path, digest_bytes, to_json
from vexport.types import Json, OnProgress
from vexport.version import __version__

# Prompts are windows of a text, and answers are kept one by one: there is no need for batches.
_AT_ONCE = 1 << 30
# The most that vLLM's server tells of each place, unless it is started with --max-logprobs.
_TOP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A generated text, under the name of vLLM's attribute."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The part of vLLM's RequestOutput that lm-eval reads."""

    outputs: tuple[Text, ...] = ()
    prompt_logprobs: tuple[Position | None, ...] = ()


class KeptAnswers:
    """Answers in a file, a line each, which a later call does not ask again."""

    def __init__(self, file: Path) -> None:
        self._file, self._answers = file, dict[str, Json]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            with suppress(ValueError):  # the last line of a killed process
                self._answers.update(json.loads(line))

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Json:
        return self._answers[key]

    def add(self, answers: Mapping[str, Json]) -> None:
        """Keep answers."""
        self._answers.update(answers)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps({key: answer})}\n" for key, answer in answers.items())


class ServedLLM(Reporting):
    """The model behind an address, asked like `vllm.LLM` by lm-eval's model.

    An answer is kept once the server still has the same model after it, or fails.
    """

    at_once = _AT_ONCE

    def __init__(self, server: Server, kept: KeptAnswers, progress: OnProgress) -> None:
        super().__init__(progress)
        self.server, self._kept, self._round = server, kept, 0
        # What vLLM looks at to choose a chat template, beyond the tokenizer's folder.
        config = SimpleNamespace(
            model="",
            tokenizer="",
            tokenizer_revision=None,
            code_revision=None,
            trust_remote_code=False,
            hf_config=SimpleNamespace(model_type=""),
        )
        self.llm_engine: object = SimpleNamespace(model_config=config)

    def ask_again(self) -> None:
        """From now on ask what was answered before, too."""
        self._round += 1

    def require_scores(self) -> None:
        """InputError unless the server gives log-probabilities of prompts."""
        self.server.score([1, 2], 1)

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[Mapping[str, Json]],
        use_tqdm: bool,
        lora_request: None,
    ) -> list[Answered]:
        """Answer prompts, in their order."""
        asks: dict[str, Callable[[], Json]] = {}
        keys = []
        for number, (prompt, parameters) in enumerate(zip(prompts, sampling_params, strict=True)):
            tokens = prompt["prompt_token_ids"]
            sampled = number if parameters.get("temperature") else None
            words = json.dumps([self._round, tokens, parameters, sampled], sort_keys=True)
            keys.append(hashlib.sha256(words.encode()).hexdigest()[:32])
            asks[keys[-1]] = partial(self._ask, tokens, parameters)
        answers = self.answers(asks)
        self.count(len(keys) - len(asks))  # the same question twice
        return [_answered(answers[key]) for key in keys]

    def answers(self, asks: Mapping[str, Callable[[], Json]]) -> KeptAnswers:
        """Ask what is not kept yet; EnvironmentFault where the server fails for good."""
        left = {key: ask for key, ask in asks.items() if key not in self._kept}
        self.count(len(asks) - len(left))
        pool = ThreadPoolExecutor(self.server.endpoint.concurrency)
        futures: dict[Future[Json], str] = {pool.submit(ask): key for key, ask in left.items()}
        fresh: dict[str, Json] = {}
        try:
            for future in as_completed(futures):
                fresh[futures[future]] = future.result()
                self.count(1)
                if len(fresh) >= self.server.endpoint.concurrency:
                    self._keep(fresh)
            self._keep(fresh)
        except UnreachableError:
            self._kept.add(fresh)
            raise
        finally:
            if not all(future.done() for future in futures):
                self.server.stop()
            pool.shutdown(wait=False, cancel_futures=True)
        return self._kept

    def _keep(self, fresh: dict[str, Json]) -> None:
        """Keep answers of the same model as at first; EnvironmentFault where there is another now."""
        if fresh:
            self.server.require_same()
            self._kept.add(fresh)
            fresh.clear()

    def _ask(self, tokens: Sequence[int], parameters: Mapping[str, Json]) -> Json:
        """One answer as it is kept: a text, or pairs of token and log-probability for each place."""
        top = parameters.get("prompt_logprobs")
        if not isinstance(top, int):
            return self.server.generate(tokens, parameters)
        return [[[token, value] for token, value in at.items()] for at in self.server.score(tokens, top)]


def _answered(answer: Json) -> Answered:
    if isinstance(answer, str):
        return Answered(outputs=(Text(text=answer),))
    assert isinstance(answer, list)
    return Answered(prompt_logprobs=(None, *map(dict, answer)))  # type: ignore[arg-type]


def main(arguments: list[str]) -> int:
    """Read the request, ask the server, write the result; 0 whenever there is a result to read."""
    return answer_request(arguments, SessionRequest, _session)


def _session(request: SessionRequest) -> SessionResult:
    result = SessionResult(name=request.name, checkpoint=request.checkpoint, platform="server")
    try:
        ask_server(request, reporter())
    except VexportError as error:
        return replace(result, problem=input_problem(error))
    return replace(
        result, tasks=request.tasks, text_file=request.text_file, logprobs_file=request.logprobs_file
    )


def ask_server(request: SessionRequest, progress: OnProgress) -> None:
    """Ask the server everything; lm-eval's files, the fingerprint and the answers go to `request.output`."""
    assert request.endpoint is not None
    assert request.output is not None
    server = Server(request.endpoint)
    fingerprint = _fingerprint(server, request.checkpoint)
    file = request.output / f"{ANSWERS}{digest_bytes(to_json(fingerprint).encode())[:16]}.jsonl"
    for other in request.output.glob(f"{ANSWERS}*"):
        if other != file:
            other.unlink()
    arguments: dict[str, JsonValue] = {
        "pretrained": str(request.checkpoint),
        "base_url": request.endpoint.url,
        "max_model_len": request.max_model_len,
        "seed": request.seed,
        "trust_remote_code": request.trust_remote_code,
    }
    read_config = transformers.AutoConfig.from_pretrained

    def config(*names: object, **options: object) -> object:
        """Of a folder with nothing but a tokenizer, an empty one."""
        try:
            return read_config(*names, **options)
        except (OSError, ValueError):
            return transformers.PretrainedConfig()

    model = ServedLLM(server, KeptAnswers(file), progress)
    if request.text:
        write_text_scores(model, request)
        return
    with tempfile.TemporaryDirectory(prefix="vexport-eval-") as folder, vllm_distribution(Path(folder)):
        from lm_eval.models import vllm_causallms
    with (
        replaced(vllm_causallms, "SamplingParams", dict),
        replaced(transformers.AutoConfig, "from_pretrained", config),
    ):
        ask_tasks(model, arguments, request)
    write_fingerprint(request.output, fingerprint)


def write_text_scores(model: ServedLLM, request: SessionRequest) -> None:
    """Write what each token of the rows costs, as `vexport.engine.generate`, and the log-probabilities of the
    likeliest tokens in the first places of each row, as a matrix (positions, tokens) with NaN for the others.
    """
    model.expect_of("text", len(request.text))
    rows = [{"prompt_token_ids": list(row)} for row in request.text]
    answers = model.generate(rows, [{"prompt_logprobs": _TOP}] * len(rows), False, None)
    scores: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for number, (row, answer) in enumerate(zip(request.text, answers, strict=True)):
        places = [place for place in answer.prompt_logprobs if place is not None]
        if any(token < 0 for place in places for token in place):
            got, need = "tokens without their ids", "return_tokens_as_token_ids, as vLLM's"
            raise InputError(model.server.endpoint.url, got=got, need=need, fix="let tasks decide (--task)")
        scores[f"nll.{number}"] = torch.tensor(
            [-place[token] for token, place in zip(row[1:], places, strict=True)]
        )
        scores[f"likeliest.{number}"] = torch.tensor([max(place, key=place.__getitem__) for place in places])
        first = places[: KL_TOKENS - 1]
        told = torch.full((len(first), 1 + max(map(max, first))), math.nan)
        for position, place in enumerate(first):
            told[position, list(place)] = torch.tensor(list(place.values()))
        logprobs[f"prompt.{number}"] = told
    for file, tensors in ((request.text_file, scores), (request.logprobs_file, logprobs)):
        assert file is not None
        with atomic_path(file) as temporary:
            save_file(tensors, temporary)


def _fingerprint(server: Server, tokenizer: Path) -> Fingerprint:
    """What the server says of itself, as far as it could change a score."""
    model = server.model
    return {
        MODEL: f"{model.name} ({model.root}) at {server.endpoint.url}",
        "vexport": __version__,
        "vllm": model.version or "unknown",
        TEMPLATE: template_of(tokenizer),
    }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a server that does not answer
