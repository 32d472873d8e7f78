"""A model over HTTP. A failing server neither loses nor changes an answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.misbehaving import AddingServer, Fault, adding_server
from tests.texts import breaks
from vexport.errors import InputError
from vexport.inference.drafts import count_drafts
from vexport.inference.endpoint.model import EndpointModel
from vexport.inference.endpoint.server import API_KEY, Server, require_address
from vexport.inference.stored_responses import StoredResponses
from vexport.records import Endpoint, Json, silent
from vexport.rules import server as server_rules

PROMPTS = [[number, 1] for number in range(100)]
KEY = "sk-of-nobody-else"


@pytest.fixture
def server() -> Iterator[AddingServer]:
    with adding_server() as server:
        yield server


def endpoint(server: AddingServer, *, retry: float = 30.0, timeout: float = 30.0) -> Endpoint:
    return Endpoint(
        url=server.url, model="adder", concurrency=8, request_timeout=timeout, retry_seconds=retry
    )


def answers_of(
    server: Endpoint, file: Path, prompts: list[list[int]] = PROMPTS, *, again: int = 0
) -> list[str]:
    model = EndpointModel(Server(server), StoredResponses(file), lambda *_: None)
    model.begin_step("", len(prompts))
    for _ in range(again):
        model.start_round()
    parameters: dict[str, Json] = {"max_tokens": 4, "stop": ["."], "temperature": 0}
    questions = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = model.generate(questions, [parameters] * len(prompts), False, None)
    return [answer.outputs[0].text for answer in answers]


@pytest.mark.parametrize("fault", [429, 503, "cut off", "abort", "slow", "closed"])
def test_temporary_faults_are_retried(fault: Fault, server: AddingServer, tmp_path: Path) -> None:
    server.faults.extend([fault] * 3)
    configured = endpoint(server, timeout=1 if fault == "slow" else 30)
    assert answers_of(configured, tmp_path / "kept") == [str(sum(prompt)) for prompt in PROMPTS]
    answered = [tuple(prompt) for prompt in server.answered]
    assert len(set(answered)) == len(PROMPTS)
    assert fault == "slow" or len(answered) == len(PROMPTS)


def test_answers_survive_failing_server(server: AddingServer, tmp_path: Path) -> None:
    """After the failure, only the missing answers are requested."""
    server.after = 50
    with breaks(server_rules.NO_RESPONSE, "HTTP 500"):
        answers_of(endpoint(server, retry=1), tmp_path / "kept")
    assert len((tmp_path / "kept").read_text().splitlines()) == 50
    server.after = None
    assert answers_of(endpoint(server), tmp_path / "kept") == [
        str(sum(prompt)) for prompt in PROMPTS
    ]
    assert not [prompt for prompt in server.answered[50:] if prompt in server.answered[:50]]
    assert len({tuple(prompt) for prompt in server.answered}) == len(PROMPTS)
    answered = len(server.answered)
    answers_of(endpoint(server), tmp_path / "kept", PROMPTS[:10], again=1)
    assert len(server.answered) == answered + 10


def test_answers_survive_dead_server(server: AddingServer, tmp_path: Path) -> None:
    server.dies_after = 21
    with breaks(server_rules.NO_RESPONSE):
        answers_of(endpoint(server, retry=0.5), tmp_path / "kept")
    assert len((tmp_path / "kept").read_text().splitlines()) == len(server.answered) == 21
    server.dies_after = None
    assert answers_of(endpoint(server), tmp_path / "kept") == [
        str(sum(prompt)) for prompt in PROMPTS
    ]
    first, later = server.answered[:21], server.answered[21:]
    assert not [prompt for prompt in later if prompt in first]


def test_finish_reason_of_answer(server: AddingServer) -> None:
    answer = Server(endpoint(server)).generate([3, 4], {"max_tokens": 4})
    assert (answer.text, answer.finish_reason) == ("7", "stop")


def test_truncated_kept_answer_is_requested_again(server: AddingServer, tmp_path: Path) -> None:
    file = tmp_path / "kept"
    answers_of(endpoint(server), file, PROMPTS[:3])
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    for _ in range(2):
        answers_of(endpoint(server), file, PROMPTS[:4])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [answer for line in lines for answer in line.values()]
    assert sorted(answer["text"] for answer in kept) == ["1", "2", "3", "4"]
    assert len(server.answered) == 5


@pytest.mark.parametrize(("given", "kept"), [("length", "length"), ("eos", "stop"), (None, "")])
def test_finish_reasons_are_kept(
    given: str | None, kept: str, server: AddingServer, tmp_path: Path
) -> None:
    """A server that never returns a finish reason receives one request per answer."""
    server.finish_reason = given
    model = EndpointModel(
        Server(endpoint(server)), StoredResponses(tmp_path / "kept"), lambda *_: None
    )
    model.begin_step("", 2)
    (answer, _) = model.generate([{"prompt_token_ids": [n]} for n in (1, 2)], [{}, {}], False, None)
    text = answer.outputs[0].text
    assert (text, text.finish_reason) == ("1", kept)
    assert len(server.answered) == 2


def test_drafts_are_counted_for_each_prompt(server: AddingServer) -> None:
    server.drafts = (50, 150, 100)
    model = EndpointModel(Server(endpoint(server)), StoredResponses(None), silent)
    counts = count_drafts(model, PROMPTS[:3])
    assert [(c.drafts, c.draft_tokens, c.accepted_tokens) for c in counts] == [server.drafts] * 3
    assert server.answered == PROMPTS[:3]
    server.others = 1
    with breaks(server_rules.COUNTERS, "2 finished"):
        count_drafts(model, PROMPTS[:1])
    server.others, server.running = 0, 1
    with breaks(server_rules.COUNTERS, "1 running"):
        count_drafts(model, PROMPTS[:1])
    server.drafts = None
    with breaks(server_rules.NO_DRAFTS):
        count_drafts(model, PROMPTS[:1])


def test_changed_model_is_refused(server: AddingServer, tmp_path: Path) -> None:
    kept = StoredResponses(tmp_path / "kept")
    model = EndpointModel(Server(endpoint(server)), kept, lambda *_: None)
    model.begin_step("", 1)
    server.root = "models/subtracter"
    with breaks(server_rules.OTHER_MODEL, "models/subtracter", "vLLM 0.32.0"):
        model.generate([{"prompt_token_ids": [3, 4]}], [{}], False, None)
    server.name = "subtracter"
    with breaks(server_rules.OTHER_MODEL, "no model adder"):
        model.server.require_same()
    assert not (tmp_path / "kept").exists()


def test_log_probabilities_of_prompt(server: AddingServer) -> None:
    configured = Server(endpoint(server))
    assert configured.score([5, 3, 9], 1) == [{3: -0.03, 7: -0.07}, {9: -0.09, 7: -0.07}]
    server.gives_scores = False
    with breaks(server_rules.NO_SCORES):
        configured.score([5, 3, 9], 1)


@pytest.mark.parametrize("status", [404, 405])
def test_chat_only_server_is_refused(status: int, server: AddingServer, tmp_path: Path) -> None:
    server.faults.extend([status] * 8)
    with breaks(server_rules.NO_COMPLETIONS, f"HTTP {status}"):
        answers_of(endpoint(server), tmp_path / "kept")


def test_key_is_not_shown_or_stored(
    server: AddingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    server.faults.extend([401] * 8)
    with pytest.raises(InputError, match="HTTP 401") as error:
        answers_of(endpoint(server), tmp_path / "kept")
    assert server.headers[0] == f"Bearer {KEY}"
    assert error.value.rule == server_rules.KEY.id
    assert KEY not in str(error.value)
    answers_of(endpoint(server), tmp_path / "kept")
    assert KEY not in (tmp_path / "kept").read_text()


def test_missing_model_or_server_is_named(server: AddingServer) -> None:
    with breaks(server_rules.MODEL, "2 models", "adder, other"):
        Server(Endpoint(url=server.url))
    with breaks(server_rules.NO_RESPONSE, "ConnectionRefusedError"):
        Server(Endpoint(url="http://127.0.0.1:9/v1", retry_seconds=0))


@pytest.mark.parametrize(
    "url",
    ["http://", "https://me:secret@host/v1", "http://host/v1?key=secret", "http://host:99999/v1"],
)
def test_unusable_address_is_refused(url: str) -> None:
    """The error does not show secrets in the address."""
    with pytest.raises(InputError) as error:
        require_address(url)
    assert "secret" not in json.dumps(str(error.value))
