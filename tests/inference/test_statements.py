"""Statements of a running server about its model, its version and its KV cache."""

import pytest

from tests.inference.replying import CARD, Reply, Sent, replying, sound, with_card
from tests.texts import breaks
from vexport.errors import InputError
from vexport.inference.endpoint.statements import server_statements
from vexport.records.serving import StartupLog
from vexport.rules import serving as rules

INFO = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e4m3",engine="0",'
    'kv_cache_dtype_skip_layers="[\\"a\\"]",kv_cache_max_concurrency="41.5",'
    'kv_cache_memory_bytes="2147483648",kv_cache_size_tokens="21248",num_gpu_blocks="1328"} 1.0\n'
)


def _with_metrics(text: str) -> Reply:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content=text.encode()) if path == "/metrics" else sound(path, body)

    return reply


def _values(log: StartupLog) -> dict[str, str]:
    names = [
        *("version", "model", "max_model_len", "kv_cache_dtype"),
        *("cache_gib", "cache_tokens", "max_concurrency"),
    ]
    stated = {name: getattr(log, name) for name in names}
    return {name: each.value for name, each in stated.items() if each is not None}


def test_statements() -> None:
    with replying(_with_metrics(INFO)) as url:
        log = server_statements(url)
    assert (log.log, log.lines) == (url, 0)
    assert _values(log) == {
        "version": "0.32.0",
        "model": CARD["root"],
        "max_model_len": "512",
        "kv_cache_dtype": "fp8_e4m3",
        "cache_gib": "2.00",
        "cache_tokens": "21248",
        "max_concurrency": "41.5",
    }


@pytest.mark.parametrize("text", ["", "vllm:cache_config_info 1.0\n", 'x{cache_dtype="fp8"} 1\n'])
def test_server_without_these_metrics(text: str) -> None:
    with replying(_with_metrics(text)) as url:
        assert "kv_cache_dtype" not in _values(server_statements(url))


def test_server_without_metrics() -> None:
    with replying(sound) as url:
        assert _values(server_statements(url))["max_model_len"] == "512"


def test_values_that_a_server_does_not_state() -> None:
    with replying(with_card(root=None, max_model_len=None)) as url:
        assert _values(server_statements(url)) == {"version": "0.32.0"}


def test_no_server() -> None:
    with replying(sound) as url:
        pass
    with breaks(rules.NO_RESPONSE, "ConnectionRefusedError"):
        server_statements(url)


def _with_cards(*cards: dict[str, object]) -> Reply:
    def reply(path: str, body: dict[str, object]) -> Sent:
        return Sent(content={"data": cards}) if path == "/v1/models" else sound(path, body)

    return reply


ADAPTER = {"id": "sql", "root": "/adapters/sql", "parent": "adder", "max_model_len": None}


@pytest.mark.parametrize(
    "cards",
    [
        (CARD, {**CARD, "id": "alias"}),
        (CARD, ADAPTER),
        (ADAPTER, {**CARD, "id": "alias", "parent": None}, CARD),
    ],
)
def test_base_model_of_several_names(cards: tuple[dict[str, object], ...]) -> None:
    with replying(_with_cards(*cards)) as url:
        values = _values(server_statements(url))
    assert (values["model"], values["max_model_len"]) == (CARD["root"], "512")


@pytest.mark.parametrize(
    "cards",
    [
        (CARD, {**CARD, "id": "other", "root": "models/other"}),
        ({"id": "one"}, {"id": "two"}),
        (ADAPTER,),
    ],
)
def test_several_base_models_or_none(cards: tuple[dict[str, object], ...]) -> None:
    with replying(_with_cards(*cards)) as url, pytest.raises(InputError) as caught:
        server_statements(url)
    assert caught.value.rule == "serving/no-model"
    assert "--model" not in str(caught.value)


def test_server_without_a_list_of_models() -> None:
    with (
        replying(lambda path, body: Sent(content={}, status=404)) as url,
        pytest.raises(InputError) as caught,
    ):
        server_statements(url)
    assert caught.value.rule == "serving/no-model"
    assert "--model" not in str(caught.value)
