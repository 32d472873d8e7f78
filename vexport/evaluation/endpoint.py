"""A model behind a server's OpenAI API: what the server says of it, and answers to prompts of token ids.

What may pass (refused, 429, 5xx, a timeout, an answer that is cut off) is tried again within bounds.
"""

import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from vexport.errors import EnvironmentFault, InputError, clip, visible
from vexport.records import Endpoint, Json
from vexport.version import __version__

T = TypeVar("T")
API_KEY = "VEXPORT_API_KEY"
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 20.0
# Seconds for the first contact: the address may be mistyped. Later the server may be restarting.
_FIRST_CONTACT = 5.0
_PASSING = (408, 425, 429)
_NO_SUCH_PATH = (404, 405, 501)
_NO_KEY = (401, 403)
_CUT_OFF = (None, "abort", "error")
_KEPT = "look at the server, and call again: what is answered is kept, and only the rest is asked"
_SHOWN = 300
_TOKEN = "token_id:"
"""vLLM's spelling of a token where it is asked for `return_tokens_as_token_ids`."""

_NEUTRAL: Mapping[str, Json] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Else vLLM's server takes what generation_config.json says; an engine that is asked here does not."""
_VLLMS = ("skip_special_tokens", "spaces_between_special_tokens")
"""Of lm-eval's parameters, vLLM's alone."""

Position = Mapping[int, float]
"""Log-probabilities by token id: that of the prompt's own token, and of the likeliest ones.

Tokens of a server that does not spell ids are -1, -2, ...
"""


class _PassingError(Exception):
    """A fault that may be over when it is tried again; `wait` is how long the server asks to wait."""

    wait = 0.0


class _RefusedError(Exception):
    """A request that the server will refuse again; `status` is that of HTTP."""

    status = 0


class UnreachableError(EnvironmentFault):
    """A server that did not answer within bounds (exit 4); what it answered before stands."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the API key to another host."""

    def redirect_request(self, *_: object) -> None:
        """Follow none: the answer is then an error with its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's answer about a model: its name, the folder or hub id it was started with, its longest
    sequence, and vLLM's version. Empty or None where the server does not say.
    """

    name: str
    root: str
    max_model_len: int | None
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A server's answer to a prompt.

    `finish_reason` is "stop" if the model ended the answer, "length" if the answer reached the limit of
    tokens, and empty if the server gives no reason.
    """

    text: str
    finish_reason: str


def is_url(name: str) -> bool:
    """True where the name of a model is the address of a server."""
    return name.startswith(("http://", "https://"))


def require_address(url: str) -> None:
    """Raise InputError for an address with a password or a query, which reports would show."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        fix = "give http://HOST:PORT/v1"
        raise InputError(clip(visible(url), 100), got="no host in it", need="a server's address", fix=fix)
    if parts.username or parts.password or parts.query or parts.fragment:
        where, got = f"{parts.scheme}://{parts.hostname}", "a password, a query or a fragment in the address"
        raise InputError(where, got=got, need="the address alone", fix=f"put a key into {API_KEY}")


class Server:
    """The model of an endpoint. Several threads may ask; `model` is what the server said at first."""

    def __init__(self, endpoint: Endpoint) -> None:
        require_address(endpoint.url)
        self.endpoint, self._stopped = endpoint, threading.Event()
        self._key = os.environ.get(API_KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            fix = "set it to the key alone"
            raise InputError(API_KEY, got="characters that no header takes", need="a key", fix=fix)
        self._url = endpoint.url.rstrip("/")
        if not urlsplit(self._url).path:
            self._url += "/v1"
        self._root = self._url.removesuffix("/v1")
        self._opener = urllib.request.build_opener(_NoRedirects)
        self.model = self._described(min(_FIRST_CONTACT, endpoint.retry_seconds))

    def stop(self) -> None:
        """Stop the retries of all threads."""
        self._stopped.set()

    def require_same(self) -> None:
        """Raise EnvironmentFault where the server has another model than at first."""
        try:
            now = self._described(self.endpoint.retry_seconds)
            words = "" if now == self.model else _words(now)
        except InputError as error:
            words = error.got
        if words:
            got = f"another model is served than before: {words}, not {_words(self.model)}"
            raise EnvironmentFault(self.endpoint.url, got=got, need="", fix=_KEPT)

    def generate(self, prompt: Sequence[int], parameters: Mapping[str, Json]) -> Answer:
        """Return the text after a prompt; `parameters` are those of the completions API."""
        if self.model.version:
            wanted = {**_NEUTRAL, **parameters}
        else:
            wanted = {name: value for name, value in parameters.items() if name not in _VLLMS}
        choice = self._complete({"prompt": list(prompt), **wanted})
        text, reason = choice["text"], choice.get("finish_reason")
        assert isinstance(text, str)
        return Answer(text=text, finish_reason=reason if isinstance(reason, str) else "")

    def score(self, prompt: Sequence[int], top: int) -> list[Position]:
        """Log-probabilities of all tokens of a prompt but the first, with the `top` likeliest in the place of
        each.

        InputError where the server gives none.
        """
        asked = {"echo": True, "logprobs": top, "max_tokens": 1, "temperature": 0}
        ids = {"return_tokens_as_token_ids": True} if self.model.version else {}
        choice = self._complete({"prompt": list(prompt), **asked, **ids})
        logprobs = choice.get("logprobs")
        given = logprobs if isinstance(logprobs, dict) else {}
        own, best = given.get("token_logprobs"), given.get("top_logprobs")
        if not isinstance(own, list) or not isinstance(best, list) or min(len(own), len(best)) < len(prompt):
            self._require_scores("none in its answer")
        places = zip(prompt[1:], own[1:], best[1:], strict=False)
        try:
            return [_position(token, value, others) for token, value, others in places]
        except (TypeError, ValueError, AttributeError):
            self._require_scores("something else in its answer")

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, summed over what they are counted by; InputError where there are none."""
        url, seconds = f"{self._root}/metrics", self.endpoint.retry_seconds
        try:
            text = self._tried(seconds, lambda: self._read(url)).decode()
        except _RefusedError as error:
            raise self._refused(error) from None
        totals: dict[str, float] = {}
        for line in text.splitlines():
            name, value = re.split(r"[{ ]", line)[0], line.rpartition(" ")[2]
            if name.startswith("vllm:"):
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _require_scores(self, got: str) -> NoReturn:
        raise InputError(
            self.endpoint.url,
            got=f"no log-probabilities of prompts from the server ({got})",
            need="completions with echo and logprobs, as vLLM's",
            fix="leave out --text, and tasks that choose by likelihood (multiple choice, perplexity)",
        )

    def _complete(self, body: dict[str, Json]) -> dict[str, Json]:
        """The one choice of an answer that is whole."""
        url, body = f"{self._url}/completions", {"model": self.model.name, **body}
        try:
            return self._tried(self.endpoint.retry_seconds, lambda: _choice(self._request(url, body)))
        except _RefusedError as error:
            self.require_same()
            if error.status in _NO_SUCH_PATH:
                raise InputError(
                    self.endpoint.url,
                    got=f"no completions ({error})",
                    need="/completions, which takes prompts as token ids: over chat completions alone the "
                    "server's template would make other prompts than the baseline's",
                    fix="give the address of vLLM itself, behind the gateway; or ask both sides with "
                    "lm-eval's local-chat-completions and compare the results with `vexport verdict`",
                ) from None
            if "echo" in body and error.status not in _NO_KEY:
                self._require_scores(str(error))
            raise self._refused(error) from None

    def _described(self, seconds: float) -> ServedModel:
        """The server's description of the chosen model; InputError where that is ambiguous."""
        try:
            cards = self._tried(seconds, lambda: _cards(self._request(f"{self._url}/models")))
        except _RefusedError as error:
            raise self._refused(error) from None
        try:
            version = self._tried(seconds, lambda: self._request(f"{self._root}/version")).get("version")
        except _RefusedError:  # vLLM's alone
            version = None
        name = self.endpoint.model or (next(iter(cards)) if len(cards) == 1 else None)
        if name not in cards:
            got = f"no model {name}" if name else f"{len(cards)} models"
            need = f"one of {', '.join(cards)}"
            fix = "name one with --model (of the baseline: --baseline-model)"
            raise InputError(self.endpoint.url, got=got, need=need, fix=fix)
        longest, root = cards[name].get("max_model_len"), cards[name].get("root")
        return ServedModel(
            name=name,
            root=root if isinstance(root, str) else "",
            max_model_len=longest if isinstance(longest, int) else None,
            version=str(version or ""),
        )

    def _tried(self, seconds: float, attempt: Callable[[], T]) -> T:
        """The answer of the first attempt that succeeds within `seconds`."""
        wait, deadline = _FIRST_WAIT, time.monotonic() + seconds
        while True:
            try:
                return attempt()
            except _PassingError as error:
                pause = min(max(wait, error.wait), _LONGEST_WAIT)
                if time.monotonic() + pause > deadline or self._stopped.wait(pause):
                    got = f"no answer: {error}"
                    raise UnreachableError(self.endpoint.url, got=got, need="", fix=_KEPT) from None
                wait *= 2

    def _request(self, url: str, body: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """The server's answer to one request, a JSON object."""
        try:
            answer: Json = json.loads(self._read(url, body))
        except ValueError:
            raise _PassingError("an answer that is cut off") from None
        if not isinstance(answer, dict):
            raise _PassingError("an answer that is no JSON object")
        return answer

    def _read(self, url: str, body: Mapping[str, Json] | None = None) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": f"vexport/{__version__}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=self.endpoint.request_timeout) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise self._status(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise _PassingError(self._shown(f"{type(reason).__name__}: {reason}")) from None

    def _status(self, error: urllib.error.HTTPError) -> _PassingError | _RefusedError:
        """The error of an answer with a status of HTTP that tells of one."""
        words = ""
        with suppress(OSError, http.client.HTTPException):
            words = self._shown(error.read(4 * _SHOWN).decode(errors="replace"))
        words = f"HTTP {error.code}: {words}" if words else f"HTTP {error.code}"
        if error.code in _PASSING or error.code >= 500:
            passing, after = _PassingError(words), str(error.headers.get("Retry-After", ""))
            passing.wait = float(after) if after.isdecimal() else 0.0
            return passing
        refused = _RefusedError(words)
        refused.status = error.code
        return refused

    def _shown(self, words: str) -> str:
        """A server's message on one line, without the API key."""
        words = words.replace(self._key, "***") if self._key else words
        return clip(visible(" ".join(words.split())), _SHOWN)

    def _refused(self, error: _RefusedError) -> InputError:
        wrong = "correct the address (http://HOST:PORT/v1) or what is asked"
        fix = f"set {API_KEY}" if error.status in _NO_KEY else wrong
        return InputError(self.endpoint.url, got=str(error), need="an answer", fix=fix)


def _choice(answer: Mapping[str, Json]) -> dict[str, Json]:
    """The choice of an answer; _PassingError where the answer was cut off."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
        raise _PassingError("an answer without a text")
    if choice.get("finish_reason") in _CUT_OFF:
        raise _PassingError(f"an answer that is cut off (finish_reason {choice.get('finish_reason')})")
    return choice


def _cards(answer: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """The models of a server's list by their names; _PassingError where there are none."""
    listed = answer.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    if not cards:
        raise _PassingError("no models in its answer")
    return {str(card.get("id")): card for card in cards}


def _words(model: ServedModel) -> str:
    return f"{model.name} ({model.root or 'no root'}, vLLM {model.version or 'unknown'})"


def _position(token: int, value: Json, others: Json) -> Position:
    """The log-probabilities in one place of a prompt, its own token's first."""
    assert isinstance(others, dict)
    position = {token: float(value)}  # type: ignore[arg-type]
    for number, (name, each) in enumerate(others.items()):
        is_spelled = name.startswith(_TOKEN)
        position.setdefault(int(name.removeprefix(_TOKEN)) if is_spelled else -1 - number, float(each))  # type: ignore[arg-type]
    return position
