"""`python -m vexport.inference.endpoint.worker REQUEST RESULT`: lm-eval asks the model behind an
address.

lm-eval's vLLM model asks, as it asks an engine of ours: the prompts are the same token ids. Its API
models cut prompts, leave out the first token that a tokenizer adds, and end answers by other rules.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from types import SimpleNamespace

import torch
import transformers
from pydantic import JsonValue
from safetensors.torch import save_file

from vexport.calibration.data import load_tokenizer
from vexport.engine.messages import (
    DRAFT_TOKENS,
    KL_TOKENS,
    SERVER,
    SessionRequest,
    SessionResult,
    draft_counts,
)
from vexport.engine.worker import answer_request, input_problem, reporter
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.files import atomic_path, to_json
from vexport.inference.endpoint.server import Server, UnreachableError
from vexport.inference.fingerprint import (
    ENDPOINT,
    MODEL,
    TEMPLATE,
    Fingerprint,
    template_of,
    write_fingerprint,
)
from vexport.inference.lm_eval_model import AskedModel, KeptAnswers, Question, kept_text, replaced
from vexport.inference.lm_eval_runner import ask_tasks, kept_answers, vllm_version
from vexport.records import PROGRESS_DETAIL, DraftCounts, Json, OnProgress
from vexport.records.values import MOST_COUNT
from vexport.version import __version__

# The most log-probabilities per position from vLLM's server, unless started with --max-logprobs.
_TOP = 20
# vLLM's metrics: requests finished, requests running, and drafts, which only a drafting server has.
ANSWERED, RUNNING = "vllm:request_success_total", "vllm:num_requests_running"
DRAFTS = "vllm:spec_decode_num_drafts_total"
COUNTERS = (
    ANSWERED,
    RUNNING,
    *(f"vllm:spec_decode_num_{each.name}_total" for each in fields(DraftCounts)),
)
# Rows that a model may add to its tokenizer's vocabulary, so that it is a multiple of 64, 128 or
# more.
_LEAST_PADDING = 8192
# Seconds for a finished request to be counted.
_COUNTED_SECONDS = 10.0
TEXT: Mapping[str, Json] = {"logprobs": _TOP}
"""In the place of the parameters: what every token of a prompt costs, and the likeliest ones."""


class EndpointModel(AskedModel):
    """The model behind an address. An answer is kept once the server still has the same model after
    it, or fails.

    The server may name only tokens below the size of the `vocabulary`.
    """

    def __init__(
        self, server: Server, kept: KeptAnswers, progress: OnProgress, vocabulary: int = MOST_COUNT
    ) -> None:
        super().__init__(kept, progress)
        self.server, self.vocabulary = server, vocabulary
        # Config attributes that vLLM uses to choose a chat template, besides the tokenizer's
        # folder.
        names = {"model": "", "tokenizer": "", "tokenizer_revision": None, "code_revision": None}
        config = SimpleNamespace(
            **names, trust_remote_code=False, hf_config=SimpleNamespace(model_type="")
        )
        self.llm_engine = SimpleNamespace(model_config=config)

    def require_scores(self) -> None:
        """Raise an error unless the server gives log-probabilities of prompts."""
        self.server.score([1, 2], 1)

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Ask as many at a time as may be under way; EnvironmentFault where the server fails for
        good.
        """
        at_once = self.server.endpoint.concurrency
        pool = ThreadPoolExecutor(at_once)
        futures = {pool.submit(self._answer, question): key for key, question in questions.items()}
        fresh: dict[str, Json] = {}
        try:
            for future in as_completed(futures):
                fresh[futures[future]] = future.result()
                self.count(1)
                if len(fresh) >= at_once:
                    self._keep(fresh)
            self._keep(fresh)
        except UnreachableError:
            self.kept.add(fresh)
            raise
        finally:
            if not all(future.done() for future in futures):
                self.server.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, fresh: dict[str, Json]) -> None:
        """Keep answers of the same model as at first; EnvironmentFault where there is another
        now.
        """
        if fresh:
            self.server.require_same()
            self.kept.add(fresh)
            fresh.clear()

    def _answer(self, question: Question) -> Json:
        """One answer as it is kept; of a text all places, as pairs of token and log-probability."""
        prompt, parameters = question.prompt, question.parameters
        if parameters == TEXT:
            places = self.server.score(prompt, _TOP, self.vocabulary)
            return [[[token, value] for token, value in place.items()] for place in places]
        if isinstance(parameters, dict):
            continuation = self.server.generate(prompt, parameters)
            return kept_text(continuation.text, continuation.finish_reason)
        places = self.server.score(prompt, 1)[question.context - 1 :]
        scored = list(zip(prompt[question.context :], places, strict=True))
        is_greedy = all(max(place, key=place.__getitem__) == token for token, place in scored)
        return [sum(place[token] for token, place in scored), is_greedy]


def _session(request: SessionRequest) -> SessionResult:
    assert request.endpoint is not None
    result, progress = SessionResult(checkpoint=request.checkpoint, platform=SERVER), reporter()
    try:
        server = Server(request.endpoint, _retries_shown(progress))
        ask_server(server, request, progress)
        drafts = count_drafts(server, request.drafted, progress) if request.drafted else ()
    except VexportError as error:
        return replace(result, problem=input_problem(error))
    return replace(
        result,
        text_file=request.text_file,
        logprobs_file=request.logprobs_file,
        drafts=drafts,
    )


def _retries_shown(progress: OnProgress) -> Callable[[str], None]:
    """Return a function that shows that the server is asked again."""
    return lambda line: progress(f"server{PROGRESS_DETAIL}{line}", 0, 1)


def ask_server(server: Server, request: SessionRequest, progress: OnProgress) -> None:
    """Ask the server's model; lm-eval's files, the fingerprint and the answers go to
    `request.output`.
    """
    assert request.output is not None
    fingerprint: Fingerprint = {
        MODEL: server.masked(f"{server.model.name} ({server.model.root})"),
        ENDPOINT: server.endpoint.url,
        "vexport": __version__,
        "vllm": server.masked(server.model.version) or "unknown",
        TEMPLATE: template_of(request.checkpoint),
    }
    model = EndpointModel(server, kept_answers(request.output, to_json(fingerprint)), progress)
    arguments: dict[str, JsonValue] = {
        "pretrained": str(request.checkpoint),
        "base_url": server.endpoint.url,
        "max_model_len": request.max_model_len,
        "seed": request.seed,
        "trust_remote_code": request.trust_tokenizer,
    }
    model.vocabulary = _vocabulary(request)
    if request.text:
        write_text_scores(model, request)
        return
    with vllm_version():
        from lm_eval.models import vllm_causallms
    with (
        replaced(vllm_causallms, "SamplingParams", dict),
        replaced(transformers.AutoConfig, "from_pretrained", _config),
    ):
        ask_tasks(model, arguments, request)
    write_fingerprint(request.output, fingerprint)


_read_config = transformers.AutoConfig.from_pretrained


def _config(*names: object, **options: object) -> object:
    """An empty config of a folder with nothing but a tokenizer."""
    try:
        return _read_config(*names, **options)
    except (OSError, ValueError):
        return transformers.PretrainedConfig()


def _vocabulary(request: SessionRequest) -> int:
    """Return a size that the model's vocabulary does not exceed: the tokenizer's, with room for
    padding.
    """
    try:
        tokenizer = load_tokenizer(request.checkpoint, trust_remote_code=request.trust_tokenizer)
    except InputError as error:
        if request.trust_tokenizer or not request.trust_remote_code:
            raise
        fix = (
            "name it with --tokenizer: --trust-remote-code runs no code of a tokenizer that "
            "a server names"
        )
        raise InputError(error.where, got=error.got, need=error.need, fix=fix) from None
    assert isinstance(tokenizer, Sized)
    known = len(tokenizer)
    return known + max(_LEAST_PADDING, known // 4)


def write_text_scores(model: EndpointModel, request: SessionRequest) -> None:
    """Write what each token of the rows costs, as `vexport.engine.generate`, and the
    log-probabilities of the likeliest tokens in the first places of each row, as a matrix
    (positions, tokens) with NaN for the others.
    """
    model.expect("text", len(request.text))
    answers = model.answers([Question(prompt=row, parameters=TEXT) for row in request.text])
    scores: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for number, (row, answer) in enumerate(zip(request.text, answers, strict=True)):
        assert isinstance(answer, list)
        places: list[dict[int, float]] = [dict(place) for place in answer]  # type: ignore[arg-type]
        if any(token < 0 for place in places for token in place):
            got, need = "tokens without their ids", "return_tokens_as_token_ids, as vLLM's"
            raise EnvironmentFault(
                model.server.endpoint.url, got=got, need=need, fix="let tasks decide (--task)"
            )
        scores[f"nll.{number}"] = torch.tensor(
            [-place[token] for token, place in zip(row[1:], places, strict=True)]
        )
        scores[f"likeliest.{number}"] = torch.tensor(
            [max(place, key=place.__getitem__) for place in places]
        )
        first = places[: KL_TOKENS - 1]
        told = torch.full((len(first), 1 + max(map(max, first))), math.nan)
        for position, place in enumerate(first):
            told[position, list(place)] = torch.tensor(list(place.values()))
        logprobs[f"prompt.{number}"] = told
    for file, tensors in ((request.text_file, scores), (request.logprobs_file, logprobs)):
        assert file is not None
        with atomic_path(file) as temporary:
            save_file(tensors, temporary)


def count_drafts(
    server: Server, prompts: Sequence[Sequence[int]], progress: OnProgress
) -> tuple[DraftCounts, ...]:
    """Continue the prompts greedily, one at a time, and read what was drafted and accepted after
    each.

    EnvironmentFault where another client asks in between, InputError for a server that does not
    draft.
    """
    counts, before = [], server.metrics(COUNTERS)
    if DRAFTS not in before:
        got, need = (
            "no counters of drafts at /metrics",
            "a vLLM server started with --speculative-config",
        )
        fix = "start it so, or leave out --speculative"
        raise InputError(server.endpoint.url, got=got, need=need, fix=fix)
    for number, prompt in enumerate(prompts):
        progress("drafts", number, len(prompts))
        server.generate(prompt, {"max_tokens": DRAFT_TOKENS, "temperature": 0, "ignore_eos": True})
        after = _counted(server, before)
        counts.append(draft_counts(after, "_total") - draft_counts(before, "_total"))
        before = after
    progress("drafts", len(prompts), len(prompts))
    return tuple(counts)


def _counted(server: Server, before: Mapping[str, float]) -> dict[str, float]:
    """Return the server's counters after the answer that follows `before` is counted."""
    deadline = time.monotonic() + _COUNTED_SECONDS
    after = server.metrics(COUNTERS)
    while after.get(ANSWERED) == before.get(ANSWERED) and time.monotonic() < deadline:
        time.sleep(0.02)
        after = server.metrics(COUNTERS)
    url = server.endpoint.url
    if missing := [name for name in COUNTERS if name not in before or name not in after]:
        got, fix = f"no counter {missing[0]} at /metrics", "ask a server of vLLM"
        raise EnvironmentFault(url, got=got, need="vLLM's counters", fix=fix)
    answered = after[ANSWERED] - before[ANSWERED]
    if answered != 1 or after[RUNNING]:
        got = f"{answered:g} answers where 1 was asked for, {after[RUNNING]:g} more under way"
        need, fix = (
            "no other client while drafts are counted",
            "call again when nobody else asks this server",
        )
        raise EnvironmentFault(url, got=got, need=need, fix=fix)
    if fallen := [name for name in COUNTERS if name != RUNNING and after[name] < before[name]]:
        got = f"the counter {fallen[0]} fell from {before[fallen[0]]:g} to {after[fallen[0]]:g}"
        raise EnvironmentFault(
            url, got=got, need="", fix="call again when the server runs undisturbed"
        )
    return after


if __name__ == "__main__":
    code = answer_request(sys.argv[1:], SessionRequest, _session)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a server that does not answer
