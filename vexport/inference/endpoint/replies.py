"""Parse the responses of a server: models, completions, log-probabilities and counters.

Nothing in a reply is trusted. A reply that does not have the API's form raises TemporaryError,
because a server that is restarting may respond correctly later.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from vexport.inference.endpoint.client import Reply
from vexport.inference.endpoint.key_mask import KeyMask
from vexport.inference.row_scores import TokenLogprobs
from vexport.inference.stored_responses import Call
from vexport.records import Json
from vexport.records.values import json_type
from vexport.words import shown

TOO_MANY, UNAVAILABLE = 429, 503
NO_SUCH_PATH = (404, 405, 501)
NO_KEY = (401, 403)
_TEMPORARY_STATUSES = (408, 425, TOO_MANY)
# Statuses of a server that is busy or starting. The server may still support this kind of request.
_BUSY = (TOO_MANY, UNAVAILABLE)
_ABORTED = ("abort", "aborted", "cancelled", "canceled", "error", "timeout")
# Spellings of `stop` and `length` in other servers: TGI, llama.cpp, Cohere, Gemini and Anthropic
# behind gateways.
_STOP_REASONS = (
    "stop",
    "eos",
    "eos_token",
    "stop_sequence",
    "stop_token",
    "end_turn",
    "complete",
    "completed",
    "done",
)
_REACHED_LIMIT = (
    "length",
    "limit",
    "max_length",
    "max_tokens",
    "max_new_tokens",
    "max_output_tokens",
)
STOP, LENGTH = "stop", "length"
# Reasons of a response that ends with calls of tools.
_CALLED = ("tool_calls", "function_call")
TOKEN = "token_id:"
"""vLLM's spelling of a token with `return_tokens_as_token_ids`."""
# A log-probability may be above 0 by rounding.
_LARGEST_LOGPROB = 0.01
_MAX_COUNT = 2.0**53
# Matches characters that cannot be encoded as UTF-8: halves of a surrogate pair of UTF-16.
_SURROGATE = re.compile("[\ud800-\udfff]")
# A label in Prometheus's text format. Values are escaped like texts in JSON.
_LABEL = re.compile(r'(?P<label>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_STATUS_KEYS = ("code", "status", "status_code", "http_code")
_RATE_LIMIT = re.compile(r"rate.?limit|too.?many.?requests|resource.?exhausted", re.IGNORECASE)
_OVERLOAD = re.compile(r"overloaded|unavailable", re.IGNORECASE)
_SECONDS = re.compile(r"\d{1,9}(\.\d*)?")
# Matches the messages of vLLM, SGLang, llama.cpp, TGI and OpenAI about a prompt that is too long.
_TOO_LONG = re.compile(
    r"context.length.exceeded|prompt.{0,20} too long|exceed.{0,40}context"
    r"|(?:context[ _](?:length|size|window)|model length|max_model_len|n_ctx|max_total_tokens"
    r"|must be <=)\D{0,40}?\d",
    re.IGNORECASE,
)


class TemporaryError(Exception):
    """A temporary fault: the next attempt may succeed.

    `wait` is the server's Retry-After in seconds. `is_busy` is True if the server cannot respond to
    any request at the moment: no connection, 429, 503. Two equal faults have the same `kind`.
    """

    wait = 0.0
    is_busy = False

    @property
    def kind(self) -> str:
        """Return the HTTP status, or the message without its numbers."""
        words = str(self)
        return words[:8] if words.startswith("HTTP ") else re.sub(r"\d+", "0", words)


class RefusedError(Exception):
    """A request that the server will refuse again. `status` is the HTTP status."""

    status = 0


class NoScoresError(Exception):
    """A response without log-probabilities of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """An entry in a server's list of models.

    If the server does not return these values, `root` and `parent` are empty, and `max_model_len`
    is None. `parent` is the base model of an adapter.
    """

    root: str
    max_model_len: int | None
    parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The generated text after a prompt.

    `finish_reason` is "stop" if the model ended the text, and "length" if the text reached the
    limit of tokens. It may also be another word from the server, and it is empty if the server
    gives no reason. `calls` are the calls of tools in a response to a conversation.
    """

    text: str
    finish_reason: str
    calls: tuple[Call, ...] = ()


def read_json(reply: Reply, mask: KeyMask, *, has_names: bool = False) -> Json:
    """Parse a reply, and mask the API key in its texts.

    With `has_names`, the texts are not masked, because later requests contain the names.

    Raises an error if the reply has an error status or an error object.
    """
    content = _parsed(reply.content, None if has_names else mask)
    is_error = isinstance(content, dict) and _is_error(content)
    if reply.status >= 300 or is_error:
        raise _error(reply, content, mask)
    if content is None:
        raise TemporaryError(f"a response that is not complete JSON: {_beginning(reply, mask)}")
    return content


def read_text(reply: Reply, mask: KeyMask) -> str:
    """Decode a reply that is plain text, and mask the API key.

    Raises an error if the reply has an error status.
    """
    if reply.status >= 300:
        raise _error(reply, _parsed(reply.content, mask), mask)
    return mask.text(reply.content.decode(errors="replace"))


def _parsed(content: bytes, mask: KeyMask | None) -> Json:
    try:
        parsed: Json = json.loads(content)
        if mask is not None:
            parsed = mask.content(parsed)
    except (ValueError, RecursionError):
        return None
    return parsed


def _beginning(reply: Reply, mask: KeyMask) -> str:
    text = mask.message(reply.content.decode(errors="replace"))[:400]
    return " ".join(text.split())[:100] or "nothing"


def _is_error(content: Mapping[str, Json]) -> bool:
    has_answer = bool(content.get("choices") or content.get("data"))
    return not has_answer and (bool(content.get("error")) or content.get("object") == "error")


def _error(reply: Reply, content: Json, mask: KeyMask) -> TemporaryError | RefusedError:
    status = reply.status
    stated = _stated_status(content, reads_words=not 300 <= status < 500)
    if status < 300:
        status = stated or 500
    elif stated in _BUSY:
        status = stated
    words = f"HTTP {reply.status}"
    shown = mask.message(reply.content.decode(errors="replace"))
    if 300 <= reply.status < 400 and reply.location:
        words += f", a redirect to {mask.message(reply.location)}"
    elif shown.strip():
        words += f": {shown}"
    if status in _TEMPORARY_STATUSES or (status >= 500 and status not in NO_SUCH_PATH):
        passing = TemporaryError(words)
        passing.wait, passing.is_busy = _seconds(reply.retry_after), status in _BUSY
        return passing
    refused = RefusedError(words)
    refused.status = status
    return refused


def _stated_status(content: Json, *, reads_words: bool) -> int:
    """Return the status in the body of an error, or 0 if there is none.

    With `reads_words`, a message about a rate limit or an overload also counts as a status.
    """
    if not isinstance(content, dict):
        return 0
    error = content.get("error")
    holders = [error, content] if isinstance(error, dict) else [content]
    for holder in holders:
        assert isinstance(holder, dict)
        for key in _STATUS_KEYS:
            value = str(holder.get(key))
            if re.fullmatch("[45][0-9][0-9]", value):
                return int(value)
    keys = ("type", "code", "message", "error") if reads_words else ()
    words = " ".join(str(holder.get(key)) for holder in holders for key in keys)
    if _RATE_LIMIT.search(words):
        return TOO_MANY
    return UNAVAILABLE if _OVERLOAD.search(words) else 0


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header, which contains a number or a date.

    Returns 0 if the header is empty or invalid.
    """
    if _SECONDS.fullmatch(retry_after):
        return float(retry_after)
    try:
        moment = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def is_too_long(words: str) -> bool:
    """Return True if a server refuses a prompt because it is too long."""
    return _TOO_LONG.search(words) is not None


def model_cards(content: Json) -> dict[str, ModelCard]:
    """Return the models in a server's list by name."""
    listed = content.get("data") if isinstance(content, dict) else content
    cards: dict[str, ModelCard] = {}
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(name, str) or not _is_usable(name):
            continue
        root, parent, longest = (entry.get(key) for key in ("root", "parent", "max_model_len"))
        is_length = isinstance(longest, int) and not isinstance(longest, bool) and longest > 0
        cards[name] = ModelCard(
            root=root if isinstance(root, str) and _is_usable(root) else "",
            max_model_len=longest if is_length else None,  # type: ignore[arg-type]
            parent=parent if isinstance(parent, str) else "",
        )
    if not cards:
        raise TemporaryError("a list of models without a usable name")
    return cards


def only_name(cards: Mapping[str, ModelCard]) -> str | None:
    """Return the name of the only model, or None if there are several."""
    return next(iter(cards)) if len(cards) == 1 else None


def base_name(cards: Mapping[str, ModelCard]) -> str | None:
    """Return a name of the base model, or None if there are several base models.

    Adapters have a parent. Several names of a model have the same root.
    """
    bases = {name: card for name, card in cards.items() if not card.parent}
    roots = {card.root for card in bases.values()}
    is_one = len(bases) == 1 or (len(roots) == 1 and "" not in roots)
    return next(iter(bases)) if is_one else None


def version_of(content: Json) -> str:
    """Return vLLM's version, or an empty string for another server."""
    version = content.get("version") if isinstance(content, dict) else None
    return (
        version if isinstance(version, str) and _is_usable(version) and len(version) <= 100 else ""
    )


def _is_usable(text: str) -> bool:
    return bool(text) and text.isprintable() and not _SURROGATE.search(text)


def choice_of(content: Json) -> dict[str, Json]:
    """Return the first choice of a response, with the response's `usage` added.

    Raises TemporaryError if the choice has no text or was aborted.
    """
    choice = _first_choice(content)
    if not isinstance(choice.get("text"), str):
        raise TemporaryError("a response without text")
    return choice


def _first_choice(content: Json) -> dict[str, Json]:
    choices = content.get("choices") if isinstance(content, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise TemporaryError("a response without text")
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason.lower() in _ABORTED:
        raise TemporaryError(f"a response that is cut off (finish_reason {reason})")
    usage = content.get("usage") if isinstance(content, dict) else None
    return {**choice, "usage": usage}


def answer_of(choice: Mapping[str, Json], parameters: Mapping[str, Json]) -> Continuation:
    """Return a choice as the continuation of a prompt with `parameters`.

    The text is cut at the first stop string, in case the server ignored `stop`. A gateway may cut a
    character in half. The remaining halves of UTF-16 pairs become U+FFFD.
    """
    text = _SURROGATE.sub("\ufffd", str(choice["text"]))
    reason = _reason(choice, parameters)
    if (end := _first_stop(text, parameters)) is not None:
        return Continuation(text=text[:end], finish_reason=STOP)
    return Continuation(text=text, finish_reason=reason)


def chat_answer_of(content: Json, parameters: Mapping[str, Json]) -> Continuation:
    """Return the first choice of a response to a conversation.

    If the response reached the limit of tokens, its finish reason is "length", even if the server
    found calls in it.

    Raises TemporaryError if the choice has no message or was aborted, or if a call has no name.
    """
    choice = _first_choice(content)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise TemporaryError("a response without a message")
    listed = message.get("tool_calls")
    calls = tuple(map(_call, listed if isinstance(listed, list) else []))
    text = message.get("content")
    if not isinstance(text, str | None):
        raise TemporaryError(f"a message with {json_type(text)} instead of text")
    reason = _reason(choice, parameters)
    if reason in _CALLED:
        reason = _reason({**choice, "finish_reason": None}, parameters) or STOP
    return Continuation(
        text=_SURROGATE.sub("\ufffd", text or ""), finish_reason=reason, calls=calls
    )


def _call(entry: Json) -> Call:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise TemporaryError("a tool call without a name")
    arguments = function.get("arguments", "")
    # Some servers return an object in the place of its text, or null without arguments.
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return Call(*(_SURROGATE.sub("\ufffd", each) for each in (name, text)))


def _reason(choice: Mapping[str, Json], parameters: Mapping[str, Json]) -> str:
    given = choice.get("finish_reason")
    if isinstance(given, str) and given:
        word = given.lower()
        if word in _STOP_REASONS:
            return STOP
        return LENGTH if word in _REACHED_LIMIT else _SURROGATE.sub("\ufffd", given)[:100]
    usage, most = choice.get("usage"), parameters.get("max_tokens")
    used = usage.get("completion_tokens") if isinstance(usage, dict) else None
    is_known = isinstance(used, int) and isinstance(most, int)
    return LENGTH if is_known and used >= most else ""  # type: ignore[operator]


def _first_stop(text: str, parameters: Mapping[str, Json]) -> int | None:
    """Return the place of the first stop string in the text.

    Returns None if there is no stop string, or if the parameters allow stop strings in the text.
    """
    if parameters.get("include_stop_str_in_output") or parameters.get("min_tokens"):
        return None
    given = parameters.get("stop")
    stops = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    found = (text.find(stop) for stop in stops if isinstance(stop, str) and stop)
    return min((place for place in found if place >= 0), default=None)


def positions_of(
    choice: Mapping[str, Json], prompt: Sequence[int], vocabulary: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities at all places of a prompt except the first.

    If the server does not return the ids of the likeliest tokens, their ids become -1, -2, ...

    Raises:
        NoScoresError: the server returns no log-probabilities.
        TemporaryError: a value is not a log-probability, or a token id is outside the vocabulary.
    """
    logprobs = choice.get("logprobs")
    given = logprobs if isinstance(logprobs, dict) else {}
    own, best = given.get("token_logprobs"), given.get("top_logprobs")
    if (
        not isinstance(own, list)
        or not isinstance(best, list)
        or min(len(own), len(best)) < len(prompt)
    ):
        raise NoScoresError
    places = zip(prompt[1:], own[1:], best[1:], strict=False)
    return [_position(token, value, others, vocabulary) for token, value, others in places]


def _position(token: int, value: Json, others: Json, vocabulary: int) -> TokenLogprobs:
    own = _logprob(value)
    if own == -math.inf:
        raise TemporaryError("an infinite log-probability of a token of the prompt")
    if not isinstance(others, dict):
        raise TemporaryError(f"top_logprobs with {json_type(others)} instead of an object")
    position = {token: own}
    for number, (name, each) in enumerate(others.items()):
        key, logprob = -1 - number, _logprob(each)
        if name.startswith(TOKEN):
            key = _token_id(name.removeprefix(TOKEN), vocabulary)
        if logprob != -math.inf:
            position.setdefault(key, logprob)
    return position


def _logprob(value: Json) -> float:
    """Return a log-probability, which may be -inf. Raises TemporaryError for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value <= _LARGEST_LOGPROB:  # type: ignore[operator]
        raise TemporaryError(f"{shown(value)} instead of a log-probability")
    return float(value) if value > -1e300 else -math.inf  # type: ignore[arg-type, operator]


def _token_id(digits: str, vocabulary: int) -> int:
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 10
    if not is_number or int(digits) >= vocabulary:
        raise TemporaryError(
            f"a token {TOKEN}{digits[:20]}, which is not in the tokenizer's vocabulary"
        )
    return int(digits)


def labels_of(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first Prometheus value with this name, or nothing."""
    line = next((each for each in text.splitlines() if each.startswith(f"{name}{{")), "")
    return {match["label"]: match["value"] for match in _LABEL.finditer(line)}


def counters_of(text: str, names: Iterable[str]) -> dict[str, float]:
    """Return the Prometheus counters with these names, summed over their labels.

    Missing counters are left out.
    """
    totals: dict[str, float] = {}
    wanted = set(names)
    for line in text.splitlines():
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if name not in wanted:
            continue
        number = line.rpartition(" ")[2]
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 <= value <= _MAX_COUNT:
            raise TemporaryError(f"the counter {name} is {number[:20]}, which is not a count")
        totals[name] = totals.get(name, 0.0) + value
    return totals
