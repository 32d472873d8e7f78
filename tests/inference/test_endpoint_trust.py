"""Choices of a server that vexport does not trust: tokenizers, and counters of drafts."""

from pathlib import Path

import pytest

from tests.inference.replying import Sent, replying, sound, with_card
from tests.texts import breaks
from vexport.errors import VexportError
from vexport.inference.drafts import count_drafts
from vexport.inference.endpoint.model import EndpointModel
from vexport.inference.endpoint.server import Server
from vexport.inference.endpoint.tokenizer import tokenizer_of
from vexport.inference.options import EngineOptions
from vexport.inference.stored_responses import StoredResponses
from vexport.names import Folder
from vexport.records import Endpoint, silent
from vexport.rules import server as rules
from vexport.scenario import Evaluate
from vexport.scenario.serve import Serve


def options_of(*, trust: bool) -> EngineOptions:
    return EngineOptions(
        serve=Serve(), vllm_python=None, trust_remote_code=trust, on_progress=silent
    )


def connect(url: str) -> Server:
    return Server(Endpoint(url=url, request_timeout=20, retry_seconds=0))


@pytest.mark.parametrize("root", ["~nosuch/x", "/etc", "/nosuch", "../x", "\ud800"])
def test_named_folder_needs_tokenizer(root: str) -> None:
    settings, options = Evaluate(tasks=("x",)), options_of(trust=False)
    with replying(with_card(root=root)) as url, breaks(rules.NO_TOKENIZER):
        tokenizer_of("candidate", url, settings, options)


def test_folder_of_remote_server_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    settings, options = Evaluate(tasks=("x",)), options_of(trust=True)
    with replying(with_card(root=str(tmp_path))) as url:
        here = tokenizer_of("candidate", url, settings, options)
        assert (here.folder, here.is_trusted) == (tmp_path, False)
        chosen = settings.model_copy(update={"tokenizer": Folder.at(tmp_path)})
        assert tokenizer_of("candidate", url, chosen, options).is_trusted
        monkeypatch.setenv(
            "http_proxy", url.removesuffix("/v1")
        )  # a host name that only the proxy can resolve
        with breaks(rules.NO_TOKENIZER, str(tmp_path)):
            tokenizer_of("candidate", "http://elsewhere.invalid/v1", settings, options)


def test_remote_server_chooses_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, options = Evaluate(tasks=("x",)), options_of(trust=True)
    with replying(with_card(root="org/chosen-by-the-server")) as url:
        monkeypatch.setenv("http_proxy", url.removesuffix("/v1"))
        with breaks(rules.UNCONFIRMED_TOKENIZER, "org/chosen-by-the-server"):
            tokenizer_of("candidate", "http://elsewhere.invalid/v1", settings, options)


METRICS = [
    b"\xff\xfe",
    b"words",
    b"vllm:request_success_total x",
    b"vllm:request_success_total NaN",
    b"",
]
METRICS += [b"vllm:spec_decode_num_drafts_total 1e400", b"vllm:spec_decode_num_drafts_total 3\n"]


@pytest.mark.parametrize("content", METRICS)
def test_invalid_counters_are_one_error(content: bytes) -> None:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content=content) if path == "/metrics" else sound(path, body)

    with replying(reply) as url, pytest.raises(VexportError) as caught:
        count_drafts(EndpointModel(connect(url), StoredResponses(None), silent), [[3, 4]])
    found = {rule.id for rule in (rules.NO_DRAFTS, rules.COUNTERS, rules.NO_RESPONSE)}
    assert caught.value.rule in found
