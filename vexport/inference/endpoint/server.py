"""Client of a server with the OpenAI API.

It reads the server's description of its model, and sends prompts as token ids.

If a request fails for a temporary reason (refused connection, 429, 5xx, timeout, incomplete
response), it is sent again, within limits of time and attempts.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from vexport.errors import EnvironmentFault, InputError, visible
from vexport.inference.endpoint.client import (
    MEBIBYTE,
    CertificateError,
    Client,
    NoReplyError,
    Reply,
)
from vexport.inference.endpoint.key_mask import KeyMask
from vexport.inference.endpoint.replies import (
    NO_KEY,
    NO_SUCH_PATH,
    Continuation,
    ModelCard,
    NoScoresError,
    RefusedError,
    TemporaryError,
    answer_of,
    chat_answer_of,
    choice_of,
    counters_of,
    is_too_long,
    labels_of,
    model_cards,
    only_name,
    positions_of,
    read_json,
    read_text,
    version_of,
)
from vexport.inference.row_scores import TokenLogprobs
from vexport.inference.shipped.base import Conversation, has_pictures
from vexport.records import Endpoint, Json
from vexport.records.values import MOST_COUNT
from vexport.rules import prompts as prompt_rules
from vexport.rules import server as rules
from vexport.rules import sight as sight_rules
from vexport.rules import tools as tool_rules
from vexport.version import __version__
from vexport.words import clip

T = TypeVar("T")
API_KEY = "VEXPORT_API_KEY"
# Seconds before the second attempt of a request, and the longest wait before a later attempt.
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 20.0
# Seconds during which the first contact is retried. This is short, because the address may be
# mistyped. Later requests are retried longer, because the server may be restarting.
_FIRST_CONTACT = 5.0
# Maximum number of seconds for the first contact, even if the server keeps sending.
_FIRST_CONTACT_ENDS = 15.0
# Maximum number of equal failures for a kind of request that never succeeded.
_MAX_EQUAL_FAILURES = 3
# Seconds between two lines about a server that does not respond.
_RETRY_LINE_SECONDS = 30.0
_MAX_SHOWN = 300
# Maximum size of a response in bytes: a fixed part, and a part for each token of generated text or
# of a prompt with 20 log-probabilities.
_ANSWER_BYTES = 4 * MEBIBYTE
_TEXT_TOKEN_BYTES = 256
_SCORED_TOKEN_BYTES = 4096
_MAX_ANSWER_BYTES = 1024 * MEBIBYTE

_NEUTRAL_SAMPLING: Mapping[str, Json] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters of every request for generated text to vLLM's server, unless the request sets them.

Without them, the server would use generation_config.json. An engine on this machine does not use
it.
"""
_VLLM_PARAMETERS = ("skip_special_tokens", "spaces_between_special_tokens")
"""Parameters from lm-eval that only vLLM supports."""
MODELS = "a request for the list of models (/models)"
VERSION = "a request for the version (/version)"
METRICS = "a request for counters (/metrics)"
GENERATE = "a prompt as token ids (/completions)"
CHAT = "a conversation (/chat/completions)"
SCORE = "a prompt as token ids with echo and logprobs (/completions)"


class UnreachableError(EnvironmentFault):
    """The server gave no usable response, and another attempt would not help (exit code 4).

    For example, all retries failed, or the certificate is not trusted. Earlier responses are kept.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's description of a model. Missing fields are empty or None.

    `root` is the folder or hub id with which the server was started. `version` is vLLM's version.
    """

    name: str
    root: str
    max_model_len: int | None
    version: str


def require_address(url: str) -> None:
    """Raise InputError for an address without a host, or with a password, query or fragment.

    Reports would show the password.
    """
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0 and bool(httpx.URL(url).host)
    except (ValueError, httpx.InvalidURL):
        has_host = False
    if not has_host:
        raise InputError.of(rules.ADDRESS, clip(visible(url), 100), found="no host")
    if parts.username or parts.password or parts.query or parts.fragment:
        where = f"{parts.scheme}://{parts.hostname}"
        raise InputError.of(rules.ADDRESS, where, found="a password, a query or a fragment")


def _ignore(line: str) -> None:
    pass


class Server:
    """Client of an endpoint's server. Several threads may use it at the same time.

    `model` is the description of the model at the first contact. `on_retry` receives a line when a
    request is retried, at most one line in 30 seconds. `first_wait` is the number of seconds before
    the second attempt. The wait doubles with each attempt. `choose` returns the name of the model
    if the endpoint names none, or None if it cannot choose.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_retry: Callable[[str], None] = _ignore,
        *,
        first_wait: float = _FIRST_WAIT,
        choose: Callable[[Mapping[str, ModelCard]], str | None] = only_name,
    ) -> None:
        require_address(endpoint.url)
        self.endpoint = endpoint
        self._stopped = threading.Event()
        key = os.environ.get(API_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InputError.of(rules.KEY_TEXT, API_KEY)
        self._mask = KeyMask(key)
        self._url = endpoint.url.rstrip("/")
        if not urlsplit(self._url).path:
            self._url += "/v1"
        self._root = self._url.removesuffix("/v1")
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"vexport/{__version__}",
            "Accept-Encoding": "identity",
        }
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = Client(self._url, headers)
        self._on_retry = on_retry
        self._last_report = -_RETRY_LINE_SECONDS
        self._first_wait = first_wait
        self._choose = choose
        # Kinds of requests with an earlier response.
        self._answered: set[str] = set()
        ends = time.monotonic() + _FIRST_CONTACT_ENDS
        self.model = self._read_served_model(
            min(_FIRST_CONTACT, endpoint.retry_seconds), ends, version=None
        )

    def stop(self) -> None:
        """Stop the retries of all threads."""
        self._stopped.set()

    def require_same(self) -> None:
        """Raise EnvironmentFault if the server has another model than at the first contact."""
        try:
            now = self._read_served_model(
                self.endpoint.retry_seconds, None, version=self.model.version
            )
            words = "" if now == self.model else self._describe_model(now)
        except InputError as error:
            words = error.got
        if words:
            before = self._describe_model(self.model)
            raise EnvironmentFault.of(
                rules.OTHER_MODEL, self.endpoint.url, now=words, before=before
            )

    def generate(self, prompt: Sequence[int], parameters: Mapping[str, Json]) -> Continuation:
        """Generate a continuation of a prompt, with `parameters` of the completions API."""
        if self.model.version:
            wanted = {**_NEUTRAL_SAMPLING, **parameters}
        else:
            wanted = {
                name: value for name, value in parameters.items() if name not in _VLLM_PARAMETERS
            }
        most = wanted.get("max_tokens")
        tokens = most if isinstance(most, int) else 0

        def read(content: Json) -> Continuation:
            return answer_of(choice_of(content), wanted)

        most_bytes = _ANSWER_BYTES + _TEXT_TOKEN_BYTES * tokens
        return self._complete(GENERATE, {"prompt": list(prompt), **wanted}, read, most_bytes)

    def chat(self, conversation: Conversation, parameters: Mapping[str, Json]) -> Continuation:
        """Generate the response to a conversation, with `parameters` of the chat API.

        The server renders the conversation, and finds the calls of tools in the response.
        """
        neutral = _NEUTRAL_SAMPLING if self.model.version else {}
        given = {name: value for name, value in parameters.items() if name not in _VLLM_PARAMETERS}
        wanted: dict[str, Json] = {**neutral, **given}
        body: dict[str, Json] = {"messages": [*map(dict, conversation.messages)], **wanted}
        if conversation.tools:
            body["tools"] = [*map(dict, conversation.tools)]
        most = wanted.get("max_tokens")
        tokens = most if isinstance(most, int) else 0

        def read(content: Json) -> Continuation:
            return chat_answer_of(content, wanted)

        return self._complete(CHAT, body, read, _ANSWER_BYTES + _TEXT_TOKEN_BYTES * tokens)

    def score(
        self, prompt: Sequence[int], top: int, vocabulary: int = MOST_COUNT
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities at all places of a prompt except the first.

        A place contains the prompt's token and the `top` likeliest tokens.

        Raises:
            InputError: the server refuses the request.
            EnvironmentFault: the response has no log-probabilities, or a token id outside the
                `vocabulary`.
        """
        scoring: dict[str, Json] = {
            "echo": True,
            "logprobs": top,
            "max_tokens": 1,
            "temperature": 0,
        }
        ids: dict[str, Json] = {"return_tokens_as_token_ids": True} if self.model.version else {}

        def read(content: Json) -> list[TokenLogprobs]:
            return positions_of(choice_of(content), prompt, vocabulary)

        most_bytes = _ANSWER_BYTES + _SCORED_TOKEN_BYTES * len(prompt)
        try:
            return self._complete(
                SCORE, {"prompt": list(prompt), **scoring, **ids}, read, most_bytes
            )
        except NoScoresError:
            raise UnreachableError.of(
                rules.NO_SCORES, self.endpoint.url, reply="its response has none"
            ) from None

    def metrics(self, names: Iterable[str]) -> dict[str, float]:
        """Return vLLM's counters with these names, summed over their labels.

        Missing counters are left out. Raises InputError if the server refuses the request.
        """
        return self._metrics(lambda text: counters_of(text, names))

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of one of vLLM's metrics, such as `vllm:cache_config_info`."""
        return self._metrics(lambda text: labels_of(text, name))

    def _metrics(self, read: Callable[[str], T]) -> T:
        url = f"{self._root}/metrics"

        def attempt(seconds: float) -> T:
            reply = self._send(url, None, seconds, _ANSWER_BYTES)
            return read(read_text(reply, self._mask))

        try:
            return self._retry(METRICS, attempt, self.endpoint.retry_seconds, None)
        except RefusedError as error:
            raise self._refused_request_error(METRICS, error) from None

    def mask_key(self, words: str) -> str:
        """Replace the API key in a server's text by `***`."""
        return self._mask.message(words)

    def _printable(self, words: str) -> str:
        return clip(visible(" ".join(self.mask_key(words).split())), _MAX_SHOWN)

    def _describe_model(self, model: ServedModel) -> str:
        return self._printable(
            f"{model.name} ({model.root or 'no root'}, vLLM {model.version or 'unknown'})"
        )

    def _complete(
        self, purpose: str, body: dict[str, Json], read: Callable[[Json], T], most_bytes: int
    ) -> T:
        url = f"{self._url}/{'chat/completions' if purpose == CHAT else 'completions'}"
        content = json.dumps({"model": self.model.name, **body}).encode()
        most_bytes = min(most_bytes, _MAX_ANSWER_BYTES)

        def attempt(seconds: float) -> T:
            return read(read_json(self._send(url, content, seconds, most_bytes), self._mask))

        try:
            return self._retry(purpose, attempt, self.endpoint.retry_seconds, None)
        except RefusedError as error:
            self.require_same()
            raise self._refused_completion_error(purpose, body, error) from None

    def _refused_completion_error(
        self, purpose: str, body: Mapping[str, Json], error: RefusedError
    ) -> InputError:
        words = self._printable(str(error))
        url = self.endpoint.url
        if purpose == CHAT:
            return self._refused_chat_error(body, error)
        prompt = body["prompt"]
        new = body.get("max_tokens")
        assert isinstance(prompt, list)
        if error.status in NO_SUCH_PATH:
            return InputError.of(rules.NO_COMPLETIONS, url, reply=words)
        if error.status not in NO_KEY and is_too_long(str(error)):
            length, new = len(prompt), body.get("max_tokens") or "some"
            return InputError.of(prompt_rules.TOO_LONG, url, prompt=length, new=new, reason=words)
        if purpose == SCORE and 400 <= error.status < 500 and error.status not in NO_KEY:
            return InputError.of(rules.NO_SCORES, url, reply=words)
        return self._refused_request_error(purpose, error)

    def _refused_chat_error(self, body: Mapping[str, Json], error: RefusedError) -> InputError:
        words = self._printable(str(error))
        is_unsupported = error.status in NO_SUCH_PATH or 400 <= error.status < 500
        if error.status in NO_KEY or not is_unsupported or is_too_long(str(error)):
            return self._refused_request_error(CHAT, error)
        if "tools" in body:
            return InputError.of(tool_rules.REFUSED, self.endpoint.url, reply=words, request=CHAT)
        if has_pictures(body["messages"]):
            return InputError.of(sight_rules.REFUSED, self.endpoint.url, reply=words)
        return self._refused_request_error(CHAT, error)

    def _refused_request_error(self, purpose: str, error: RefusedError) -> InputError:
        rule = rules.KEY if error.status in NO_KEY else rules.REFUSED
        reply = self._printable(str(error))
        return InputError.of(rule, self.endpoint.url, reply=reply, request=purpose)

    def _read_served_model(
        self, seconds: float, ends: float | None, version: str | None
    ) -> ServedModel:
        """Return the server's description of the chosen model.

        `version` is the version from the first contact, or None at the first contact. The version
        is not requested again if it was empty. Raises InputError if the server does not have the
        chosen model, or has several models and none is chosen.
        """
        cards = self._cards(seconds, ends)
        name = self.endpoint.model or self._choose(cards)
        if name not in cards:
            found = f"no model {name}" if name else f"{len(cards)} models"
            known = self._printable(", ".join(cards))
            raise InputError.of(rules.MODEL, self.endpoint.url, found=found, known=known)
        card = cards[name]
        return ServedModel(
            name=name,
            root=card.root,
            max_model_len=card.max_model_len,
            version=self._version(seconds, ends) if version != "" else "",
        )

    def _cards(self, seconds: float, ends: float | None) -> dict[str, ModelCard]:
        def attempt(limit: float) -> dict[str, ModelCard]:
            reply = self._send(f"{self._url}/models", None, limit, _ANSWER_BYTES)
            return model_cards(read_json(reply, self._mask, has_names=True))

        try:
            return self._retry(MODELS, attempt, seconds, ends)
        except RefusedError as error:
            if self.endpoint.model and error.status >= 400:
                return {self.endpoint.model: ModelCard(root="", max_model_len=None)}
            reply = self._printable(str(error))
            raise InputError.of(rules.NO_LIST, self.endpoint.url, reply=reply) from None

    def _version(self, seconds: float, ends: float | None) -> str:
        """Return vLLM's version, or an empty string for other servers.

        Other servers have no path /version, or return something else there.
        """

        def attempt(limit: float) -> str:
            reply = self._send(f"{self._root}/version", None, limit, _ANSWER_BYTES)
            try:
                return version_of(read_json(reply, self._mask))
            except TemporaryError:
                if reply.status < 300:
                    return ""
                raise

        try:
            return self._retry(VERSION, attempt, seconds, ends)
        except RefusedError:
            return ""
        except UnreachableError:
            if ends is None:
                raise
            return ""

    def _retry(
        self, purpose: str, attempt: Callable[[float], T], seconds: float, ends: float | None
    ) -> T:
        """Return the result of the first attempt that succeeds.

        `attempt` receives its time limit. Attempts begin and end within `seconds` after the first
        failure, and before the moment `ends`. If this kind of request has never succeeded, the
        third equal failure is final.
        """
        failures: Counter[str] = Counter()
        wait = self._first_wait
        deadline = ends
        while True:
            limit = self.endpoint.request_timeout
            if deadline is not None:
                limit = min(limit, max(deadline - time.monotonic(), 1.0))
            try:
                if self._stopped.is_set():
                    raise TemporaryError("other requests to the server failed")
                answer = attempt(limit)
            except TemporaryError as error:
                words = self._printable(str(error))
                now = time.monotonic()
                if not failures:
                    deadline = min(now + seconds, ends or now + seconds)
                failures["" if error.is_busy else error.kind] += 1
                is_settled = purpose not in self._answered
                is_settled &= failures[error.kind] >= _MAX_EQUAL_FAILURES
                pause = min(max(wait, error.wait), _LONGEST_WAIT)
                assert deadline is not None
                if not is_settled and now + pause <= deadline:
                    self._report_retry(words, deadline - now)
                    if not self._stopped.wait(pause):
                        wait *= 2
                        continue
                raise UnreachableError.of(
                    rules.NO_RESPONSE, self.endpoint.url, request=purpose, reason=words
                ) from None
            self._answered.add(purpose)
            return answer

    def _report_retry(self, words: str, left: float) -> None:
        now = time.monotonic()
        if now - self._last_report >= _RETRY_LINE_SECONDS:
            self._last_report = now
            self._on_retry(
                f"no response ({clip(words, 120)}), retrying for {left:.0f} s (--retry-seconds)"
            )

    def _send(self, url: str, body: bytes | None, seconds: float, most_bytes: int) -> Reply:
        """Send a request and return the reply.

        Raises TemporaryError if there is no reply, and UnreachableError for a bad certificate.
        """
        try:
            return self._client.send(url, body, seconds=seconds, most_bytes=most_bytes)
        except CertificateError as error:
            reason = self._printable(str(error))
            raise UnreachableError.of(rules.CERTIFICATE, self.endpoint.url, reason=reason) from None
        except NoReplyError as error:
            passing = TemporaryError(str(error))
            passing.is_busy = error.is_connection
            raise passing from None
