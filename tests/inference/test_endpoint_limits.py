"""A server that sends too much, too slowly or nonsense. Requests end in time, with one line."""

import copy
import gzip
import html
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import quote

import pytest

from tests.inference.replying import Sent, choice, replying, sending_raw, sound, with_card
from tests.texts import breaks
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.inference.endpoint.server import API_KEY, GENERATE, SCORE, Server
from vexport.records import Endpoint, Json
from vexport.rules import prompts as prompt_rules
from vexport.rules import server as rules
from vexport.rules.book import Rule

OK = b"HTTP/1.1 200 OK\r\n"
MEBIBYTE = 1 << 20
PARAMETERS: dict[str, Json] = {"max_tokens": 4, "temperature": 0}
# Seconds between the first attempt and the second.
FIRST_WAIT = 0.01


def slowly(text: bytes) -> Iterator[bytes]:
    for number in itertools.chain(text, itertools.repeat(ord(" "))):
        yield bytes([number])
        time.sleep(0.1)


def endless(head: bytes, part: bytes) -> Iterator[bytes]:
    yield head
    while True:
        yield part


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "slow status": lambda: slowly(OK),
    "slow header": lambda: itertools.chain([OK], slowly(b"Server: " + b"a" * 1000)),
    "slow headers": lambda: itertools.chain([OK], slowly(b"A: b\r\n" * 1000)),
    "slow body": lambda: itertools.chain([OK, b"Content-Length: 1000\r\n\r\n"], slowly(b"{")),
    "slow body of an error": lambda: itertools.chain(
        [b"HTTP/1.1 500 Oh\r\nContent-Length: 1000\r\n\r\n"], slowly(b"{")
    ),
    "endless header": lambda: endless(OK + b"Server: ", b"a" * 4096),
    "endless headers": lambda: endless(OK, b"Server: abc\r\n" * 100),
    "endless continue": lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "endless body": lambda: endless(OK + b"\r\n", b"[" * 65536),
    "endless chunks": lambda: endless(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"[" * 65536 + b"\r\n"
    ),
    "huge length": lambda: endless(
        OK + b"Content-Length: 1000000000000000000\r\n\r\n", b"[" * 65536
    ),
    "gzip bomb": lambda: iter(
        [OK + b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b"[" * 100 * MEBIBYTE, 1)]
    ),
    "nothing": lambda: iter([]),
    "no HTTP": lambda: iter([b"SSH-2.0-OpenSSH_9.6\r\n"]),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_end_in_time(flood: str) -> None:
    with sending_raw(FLOODS[flood]) as (url, sent):
        began = time.monotonic()
        with breaks(rules.NO_RESPONSE):
            Server(Endpoint(url=url, request_timeout=0.4, retry_seconds=0))
        assert time.monotonic() - began < 8
        assert sent[0] < 64 * MEBIBYTE or flood == "endless continue"


def test_retries_end_in_time() -> None:
    """The limits are the request's time, and --retry-seconds after its first failure."""
    with sending_raw(FLOODS["slow body"]) as (url, _):
        began = time.monotonic()
        with pytest.raises(EnvironmentFault):
            Server(Endpoint(url=url, request_timeout=1, retry_seconds=2))
        assert 2 < time.monotonic() - began < 10


def connect(
    url: str, *, retry: float = 0, model: str | None = None, on_retry: Callable[[str], None] = print
) -> Server:
    endpoint = Endpoint(url=url, request_timeout=20, retry_seconds=retry, model=model)
    return Server(endpoint, on_retry, first_wait=FIRST_WAIT)


def with_choice(**fields: object) -> Callable[[str, dict[str, object]], Sent]:
    """Return a function that replies like a sound server, with changed fields in the answers."""

    def reply(path: str, body: dict[str, object]) -> Sent:
        if path != "/v1/completions":
            return sound(path, body)
        return Sent(
            content={"choices": [{**choice(body), **fields}], "usage": {"completion_tokens": 4}}
        )

    return reply


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"finish_reason": "eos"}, "5", "stop"),
        ({"finish_reason": "EOS_TOKEN"}, "5", "stop"),
        ({"finish_reason": "max_tokens"}, "5", "length"),
        ({"finish_reason": None}, "5", "length"),
        ({"finish_reason": 7}, "5", "length"),
        ({"finish_reason": "content_filter"}, "5", "content_filter"),
        ({"index": None}, "5", "stop"),
        ({"text": "5 END 6 .", "finish_reason": "length"}, "5 ", "stop"),
        ({"text": "a\ud83d"}, "a\ufffd", "stop"),
    ],
)
def test_answers_of_other_servers(fields: dict[str, object], text: str, reason: str) -> None:
    with replying(with_choice(**fields)) as url:
        answer = connect(url).generate([3, 2], {**PARAMETERS, "stop": [".", "END"]})
    assert (answer.text, answer.finish_reason) == (text, reason)


def with_likely_tokens(value: object) -> dict[str, object]:
    return {
        "logprobs": {"token_logprobs": [None, -0.1, -0.1], "top_logprobs": [None, value, value]}
    }


def with_token_scores(value: object) -> dict[str, object]:
    return {"logprobs": {"token_logprobs": [None, value, value], "top_logprobs": [None, {}, {}]}}


WRONG_LIKELY_TOKENS: list[object] = [
    None,
    [],
    "text",
    3,
    {"token_id:5": None},
    {"token_id:5": [1]},
    {"token_id:5": math.nan},
]
WRONG_NAMES = [
    "token_id:",
    "token_id:-5",
    "token_id:x",
    "token_id:3000000000",
    "token_id:" + "9" * 5000,
]
WRONG_TOKEN_SCORES: list[object] = [
    None,
    "x",
    True,
    [],
    math.nan,
    -math.inf,
    3.5,
    10**400,
    -(10**400),
]
WRONG_SCORES = {
    **{
        f"top {number}": with_likely_tokens(value)
        for number, value in enumerate(WRONG_LIKELY_TOKENS)
    },
    **{
        f"name {number}": with_likely_tokens({name: -1.0})
        for number, name in enumerate(WRONG_NAMES)
    },
    **{
        f"own {number}": with_token_scores(value) for number, value in enumerate(WRONG_TOKEN_SCORES)
    },
}


@pytest.mark.parametrize("fields", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_wrong_log_probabilities_are_server_faults(fields: dict[str, object]) -> None:
    with (
        replying(with_choice(**fields)) as url,
        breaks(rules.NO_RESPONSE),
    ):
        connect(url).score([3, 2, 4], 1, vocabulary=100)


@pytest.mark.parametrize(
    "logprobs", [None, [], {}, {"token_logprobs": [None], "top_logprobs": None}]
)
def test_missing_log_probabilities_are_named(logprobs: object) -> None:
    with (
        replying(with_choice(logprobs=logprobs)) as url,
        breaks(rules.NO_SCORES),
    ):
        connect(url).score([3, 2, 4], 1)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_refused_log_probabilities_are_bad_input(status: int) -> None:
    with replying(with_status(status)) as url, pytest.raises(InputError):
        connect(url).score([3, 2, 4], 1)


BODIES = [
    b"",
    b"null",
    b'"text"',
    b"[]",
    b"<html>502</html>",
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"choices": [3]}',
]
BODIES += [
    b'{"choices": {"0": 1}}',
    b'{"choices": [{"text": 3}]}',
    b'{"choices": [{"text": null}]}',
    b"1" * 10_000,
]


@pytest.mark.parametrize("content", BODIES, ids=lambda content: str(content[:20]))
def test_invalid_content_is_server_fault(content: bytes) -> None:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content=content) if body else sound(path, body)

    with replying(reply) as url, breaks(rules.NO_RESPONSE):
        connect(url).generate([3], PARAMETERS)


def with_status(
    status: int, content: object = b"<html>no</html>", **headers: str
) -> Callable[..., Sent]:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content=content, status=status, headers=headers) if body else sound(path, body)

    return reply


@pytest.mark.parametrize(
    ("status", "rule"),
    [
        (301, rules.REFUSED),
        (307, rules.REFUSED),
        (400, rules.REFUSED),
        (401, rules.KEY),
        (404, rules.NO_COMPLETIONS),
        (413, rules.REFUSED),
        (422, rules.REFUSED),
    ],
)
def test_refused_requests_name_remedy(status: int, rule: Rule) -> None:
    reply = with_status(status, Location="http://elsewhere/v1/completions")
    with replying(reply) as url, breaks(rule, f"HTTP {status}"):
        connect(url, retry=5).generate([3], PARAMETERS)


@pytest.mark.parametrize("status", [500, 502, 504])
def test_permanent_failure_is_given_up(status: int) -> None:
    lines: list[str] = []
    with replying(with_status(status)) as url:
        server = connect(url, retry=300, on_retry=lines.append)
        began = time.monotonic()
        with breaks(rules.NO_RESPONSE, GENERATE, f"HTTP {status}: <html>"):
            server.generate([3], PARAMETERS)
        with breaks(rules.NO_RESPONSE, SCORE, f"HTTP {status}"):
            server.score([3, 4], 1)
    assert time.monotonic() - began < 10
    assert len(lines) == 1
    assert "retrying for 300 s (--retry-seconds)" in lines[0]


BUSY = [
    with_status(429),
    with_status(503),
    with_status(200, {"error": {"message": "slow down", "code": 429}}),
]
BUSY += [
    with_status(200, {"error": {"code": "rate_limit_exceeded"}}),
    with_status(500, {"error": {"code": "429"}}),
]
BUSY += [
    with_status(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
    with_status(503, **{"Retry-After": "x"}),
]


@pytest.mark.parametrize("busy", BUSY)
def test_busy_server_is_retried(busy: Callable[..., Sent]) -> None:
    failures = iter([busy] * 4)

    def reply(path: str, body: dict[str, object]) -> Sent:
        return next(failures, sound)(path, body) if body else sound(path, body)

    with replying(reply) as url:
        assert connect(url, retry=30).generate([3, 4], PARAMETERS).text == "7"


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 12 tokens. However, you requested 20 tokens.",
        "The input (20 tokens) is longer than the model's context length (12 tokens).",
        "the request exceeds the available context size (12 tokens), try increasing it",
        "The decoder prompt (length 20) is longer than the maximum model length of 12.",
        "`inputs` tokens + `max_new_tokens` must be <= 12. Given: 20 `inputs` tokens",
    ],
)
def test_long_prompt_names_limit(words: str) -> None:
    with replying(with_status(400, {"error": {"message": words}})) as url:
        server = connect(url)
        for ask in (lambda: server.generate([3], PARAMETERS), lambda: server.score([3, 4], 1)):
            with breaks(prompt_rules.TOO_LONG, "12"):
                ask()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_server_without_model_list(status: int) -> None:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return sound(path, body) if body else Sent(content={}, status=status)

    with replying(reply) as url:
        with breaks(rules.NO_LIST, f"HTTP {status}"):
            connect(url)
        assert connect(url, model="adder").generate([3, 4], PARAMETERS).text == "7"


@pytest.mark.parametrize("longest", [-5, 0, True, "512", 1.5, None, [], float("inf")])
def test_invalid_max_model_len_is_unknown(longest: object) -> None:
    with replying(with_card(max_model_len=longest)) as url:
        assert connect(url).model.max_model_len is None


@pytest.mark.parametrize("name", ["\ud800", "", None, 3, ["x"], "a\nb"])
def test_model_needs_name(name: object) -> None:
    with (
        replying(with_card(id=name)) as url,
        breaks(rules.NO_RESPONSE, "list of models"),
    ):
        connect(url)


@pytest.mark.parametrize("version", ["\ud800", 3, None, {"major": 1}, "x" * 1000])
def test_invalid_version_is_unknown(version: object) -> None:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content={"version": version}) if path == "/version" else sound(path, body)

    with replying(reply) as url:
        assert connect(url).model.version == ""


def test_echoed_key_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sk-of-nobody-else")
    with replying(with_choice(text="a sk-of-nobody-else b")) as url:
        server = connect(url)
        assert server.generate([3], PARAMETERS).text == "a *** b"
    with replying(with_card(id="sk-of-nobody-else")) as url:
        server = connect(url)
        assert server.model.name == "sk-of-nobody-else"
        assert server.mask_key(server.model.name) == "***"


ODD_KEY = 'sk-ab/cD+12=="x\\y&z'
SPELLINGS = {
    "plain": ODD_KEY,
    "JSON": json.dumps(ODD_KEY),
    "JSON in JSON": json.dumps(json.dumps(ODD_KEY)),
    "slashes of PHP": json.dumps(ODD_KEY).replace("/", "\\/"),
    "code points": "".join(f"\\u{ord(each):04X}" for each in ODD_KEY),
    "some code points": ODD_KEY.replace("\\", "\\\\").replace("=", "\\u003d").replace("s", "\\x73"),
    "address": quote(ODD_KEY, safe=""),
    "JSON in an address": quote(json.dumps(ODD_KEY), safe=""),
    "address in an address": quote(quote(ODD_KEY, safe="")),
    "HTML": html.escape(ODD_KEY),
    "numbers in HTML": "".join(f"&#{ord(each)};" for each in ODD_KEY),
}


# Parts of the key, in the spellings of its letters and digits.
PARTS = re.compile(r"sk.?.?ab|cD|12|%73|u0073|x73|&#115")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelled_key_is_masked_before_cut(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the key remains, wherever a message or a response is cut."""
    monkeypatch.setenv(API_KEY, ODD_KEY)
    key = SPELLINGS[spelling]
    sent = Sent(content="")
    with replying(lambda path, body: sent if "completions" in path else sound(path, body)) as url:
        server = connect(url)
        for shift in range(0, 24, 4):
            answer = choice({"prompt": [3]}) | {"text": f"a {key} b"}
            answer["finish_reason"] = "y" * (76 + shift) + key
            sent = Sent(content={"choices": [answer]})
            generated = server.generate([3], PARAMETERS)
            assert "***" in generated.text
            assert not PARTS.search(generated.text + generated.finish_reason)
            for body in ("y" * (380 + shift) + key, json.dumps({"error": "y" * shift + key})):
                sent = Sent(content=body.encode(), status=400)
                with pytest.raises(InputError) as caught:
                    server.generate([3], PARAMETERS)
                assert not PARTS.search(str(caught.value).replace(url, ""))
        scores = {"token_logprobs": [None, -1.0], "top_logprobs": [None, {f"token_id:{key}": -1.0}]}
        sent = Sent(content={"choices": [choice({"prompt": [3]}) | {"logprobs": scores}]})
        with pytest.raises(EnvironmentFault) as fault:
            server.score([3, 5], 1)
        assert not PARTS.search(str(fault.value).replace(url, ""))


VALUES: list[object] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    float("nan"),
    "",
    "\ud800",
    [],
    {},
    [[]],
    {"a": None},
]


def mutated(value: object, rng: random.Random) -> object:
    """Replace or remove one value at a random place in JSON."""
    value = copy.deepcopy(value)
    holder, key = None, None
    inner: object = value
    while isinstance(inner, dict | list) and inner and (holder is None or rng.random() < 0.85):
        holder = inner
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = inner[key]
    assert isinstance(holder, dict | list)
    if rng.random() < 0.2:
        del holder[key]  # type: ignore[arg-type]
    else:
        holder[key] = rng.choice(VALUES)  # type: ignore[index]
    return value


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Change, cut or repeat some bytes."""
    place = rng.randrange(len(content))
    end = min(len(content), place + rng.randrange(1, 20))
    return rng.choice(
        [content[:place], content[:place] + content[end:], content[:end] + content[place:]]
        + [content[:place] + bytes(rng.randbytes(3)) + content[end:]]
    )


@pytest.mark.parametrize("seed", range(4))
def test_damaged_answers(seed: int) -> None:
    """A damaged answer gives a valid result or one of vexport's errors."""
    rng = random.Random(seed)
    where = ["/v1/models", "/version", "/v1/completions"]
    target = where[0]

    def reply(path: str, body: dict[str, object]) -> Sent:
        whole = sound(path, body).content
        if path != target:
            return Sent(content=whole)
        if rng.random() < 0.7:
            return Sent(content=mutated(whole, rng))
        return Sent(content=damaged(json.dumps(whole).encode(), rng))

    with replying(reply) as url:
        for number in range(21):
            target = where[number % 3]
            with suppress(VexportError):
                server = connect(url)
                answer = server.generate([3, 4], PARAMETERS)
                assert isinstance(answer.text, str)
                assert isinstance(answer.finish_reason, str)
                (place,) = server.score([3, 4], 1, vocabulary=100)
                assert all(math.isfinite(value) and token < 100 for token, value in place.items())
