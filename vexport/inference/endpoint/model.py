"""Run prompts on the model behind a server's address, several requests at a time."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import fields
from types import SimpleNamespace

from vexport.engine.messages import DRAFT_TOKENS, draft_counts
from vexport.errors import EnvironmentFault, InputError
from vexport.inference.endpoint.server import Server, UnreachableError
from vexport.inference.model import Model, Question, TokenIds
from vexport.inference.row_scores import (
    RowScores,
    scores_from_json,
    scores_of_places,
    scores_to_json,
)
from vexport.inference.stored_responses import StoredResponses, answer_to_json
from vexport.records import DraftCounts, Json, OnProgress
from vexport.records.values import MOST_COUNT
from vexport.rules import server as rules

# Maximum number of log-probabilities per position from vLLM's server, unless the server was started
# with --max-logprobs.
_TOP_LOGPROBS = 20
# vLLM's metrics: finished requests, running requests, and drafts (only on a server that drafts).
FINISHED_REQUESTS = "vllm:request_success_total"
RUNNING_REQUESTS = "vllm:num_requests_running"
DRAFTS = "vllm:spec_decode_num_drafts_total"
COUNTERS = (
    FINISHED_REQUESTS,
    RUNNING_REQUESTS,
    *(f"vllm:spec_decode_num_{each.name}_total" for each in fields(DraftCounts)),
)
# Maximum number of seconds until the server counts a finished request.
_COUNTED_SECONDS = 10.0
TEXT: Mapping[str, Json] = {"logprobs": _TOP_LOGPROBS}
"""Marks a question for a row of a text, whose response has the log-probabilities at each place.

These are not parameters of the server's API. They are a part of the key of the stored response.
"""
# Maximum number of tokens of rows in open requests. The response takes about 1 KB per token until
# it is parsed.
_MAX_OPEN_TOKENS = 1 << 16


class EndpointModel(Model):
    """A model behind an address.

    Responses are stored after the server has confirmed that it still serves the same model. If the
    server fails, finished responses are stored without this check. Token ids from the server must
    be below the size of the `vocabulary`.
    """

    takes_messages = True

    def __init__(
        self,
        server: Server,
        stored_responses: StoredResponses,
        on_progress: OnProgress,
        vocabulary: int = MOST_COUNT,
    ) -> None:
        super().__init__(stored_responses, on_progress)
        self.server = server
        self.vocabulary = vocabulary
        # vLLM chooses a chat template by these attributes and by the tokenizer's folder.
        names = {"model": "", "tokenizer": "", "tokenizer_revision": None, "code_revision": None}
        config = SimpleNamespace(
            **names, trust_remote_code=False, hf_config=SimpleNamespace(model_type="")
        )
        self.llm_engine = SimpleNamespace(model_config=config)

    def require_scores(self) -> None:
        """Raise an error if the server does not return log-probabilities of prompts."""
        self.server.score([1, 2], 1)

    def ask(self, questions: Mapping[str, Question]) -> None:
        """Send questions to the server, as many at a time as the endpoint's `concurrency` allows.

        Raises EnvironmentFault if the server fails permanently. All responses so far are kept.
        """
        at_once = self.at_once(questions.values())
        pool = ThreadPoolExecutor(at_once)
        futures = {pool.submit(self._answer, question): key for key, question in questions.items()}
        fresh: dict[str, Json] = {}
        try:
            for future in as_completed(futures):
                fresh[futures[future]] = future.result()
                self.count(1)
                if len(fresh) >= at_once:
                    self._store_answers(fresh)
            self._store_answers(fresh)
        except UnreachableError:
            self.stored_responses.add({**fresh, **_finished(futures, self.stored_responses)})
            raise
        finally:
            if not all(future.done() for future in futures):
                self.server.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def at_once(self, questions: Iterable[Question]) -> int:
        """Return the maximum number of open requests: fewer for long rows of a text."""
        most = self.server.endpoint.concurrency
        lengths = [len(each.prompt) for each in questions if each.parameters == TEXT]
        if not lengths:
            return most
        return max(1, min(most, _MAX_OPEN_TOKENS // max(lengths)))

    def _store_answers(self, fresh: dict[str, Json]) -> None:
        """Store responses. Raise EnvironmentFault if the server has another model now."""
        if fresh:
            self.server.require_same()
            self.stored_responses.add(fresh)
            fresh.clear()

    def _answer(self, question: Question) -> Json:
        """Send one question to the server, and return the response as `StoredResponses` stores it.

        The response to a row of a text has the form of `scores_to_json`. Raises EnvironmentFault if
        the server does not return the ids of the likeliest tokens.
        """
        prompt, parameters = question.prompt, question.parameters
        if parameters == TEXT:
            places = self.server.score(prompt, _TOP_LOGPROBS, self.vocabulary)
            if any(token < 0 for place in places for token in place):
                raise EnvironmentFault.of(
                    rules.NO_SCORES, self.server.endpoint.url, reply="its tokens have no ids"
                )
            return scores_to_json(scores_of_places(places))
        if isinstance(parameters, dict):
            continuation = (
                self.server.generate(prompt, parameters)
                if question.conversation is None
                else self.server.chat(question.conversation, parameters)
            )
            return answer_to_json(continuation.text, continuation.finish_reason, continuation.calls)
        places = self.server.score(prompt, 1)[question.context - 1 :]
        scored = list(zip(prompt[question.context :], places, strict=True))
        is_greedy = all(max(place, key=place.__getitem__) == token for token, place in scored)
        return [sum(place[token] for token, place in scored), is_greedy]

    def score_rows(self, rows: Sequence[TokenIds]) -> Iterator[RowScores]:
        """Yield the log-probabilities of each row's tokens and of the 20 likeliest tokens.

        Raises EnvironmentFault if the server does not return the ids of these tokens.
        """
        self.begin_step("text", len(rows))
        questions = [Question(prompt=row, parameters=TEXT) for row in rows]
        yield from map(scores_from_json, self.answers(questions))

    def count_draft(self, prompt: TokenIds) -> DraftCounts:
        """Continue a prompt and count its drafts from the server's counters.

        Raises InputError if the server does not draft, and EnvironmentFault if another client uses
        the server at the same time.
        """
        before = self.server.metrics(COUNTERS)
        if DRAFTS not in before:
            raise InputError.of(rules.NO_DRAFTS, self.server.endpoint.url)
        self.server.generate(
            prompt, {"max_tokens": DRAFT_TOKENS, "temperature": 0, "ignore_eos": True}
        )
        after = _counters_after_answer(self.server, before)
        return draft_counts(after, "_total") - draft_counts(before, "_total")


def _finished(
    futures: Mapping[Future[Json], str], stored_responses: StoredResponses
) -> dict[str, Json]:
    return {
        key: future.result()
        for future, key in futures.items()
        if key not in stored_responses and _has_result(future)
    }


def _has_result(future: Future[Json]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _counters_after_answer(server: Server, before: Mapping[str, float]) -> dict[str, float]:
    """Wait until the server has counted a request that finished, and return the counters.

    `before` has the counters from before the request. Raises EnvironmentFault if the difference is
    not exactly one request.
    """
    deadline = time.monotonic() + _COUNTED_SECONDS
    after = server.metrics(COUNTERS)
    while (
        after.get(FINISHED_REQUESTS) == before.get(FINISHED_REQUESTS)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
        after = server.metrics(COUNTERS)
    _require_one_answer(server.endpoint.url, before, after)
    return after


def _require_one_answer(url: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    missing = [name for name in COUNTERS if name not in before or name not in after]
    if missing:
        raise EnvironmentFault.of(rules.COUNTERS, url, found=f"no counter {missing[0]}")
    answered = after[FINISHED_REQUESTS] - before[FINISHED_REQUESTS]
    if answered != 1 or after[RUNNING_REQUESTS]:
        found = f"{answered:g} finished and {after[RUNNING_REQUESTS]:g} running requests"
        raise EnvironmentFault.of(rules.COUNTERS, url, found=found)
    for name in COUNTERS:
        if name != RUNNING_REQUESTS and after[name] < before[name]:
            found = f"{name} that fell from {before[name]:g} to {after[name]:g}"
            raise EnvironmentFault.of(rules.COUNTERS, url, found=found)
