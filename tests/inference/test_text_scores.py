"""Rows of a text that a server scores, and the files that evaluations read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.inference.misbehaving import adding_server
from tests.inference.replying import Sent, choice, replying, sound
from tests.texts import breaks
from vexport.inference.endpoint.model import TEXT, EndpointModel
from vexport.inference.endpoint.server import Server
from vexport.inference.engine_model import top_tokens
from vexport.inference.model import Question
from vexport.inference.row_scores import NO_TOKEN, scores_from_json, scores_of_flat, scores_to_json
from vexport.inference.stored_responses import StoredResponses
from vexport.inference.text_scores import rows_to_repeat, write_text_scores
from vexport.records import Endpoint, silent
from vexport.rules import server as rules

ROWS = [[5, 3, 9], [2, 8]]


def model_at(url: str, kept: Path | None = None) -> EndpointModel:
    server = Server(Endpoint(url=url, model="adder", request_timeout=20, retry_seconds=0))
    return EndpointModel(server, StoredResponses(kept), silent, vocabulary=100)


def test_server_scores(tmp_path: Path) -> None:
    """Each token costs a hundredth of its id. Token 7 is always among the most likely tokens."""
    scores, logprobs = tmp_path / "text.safetensors", tmp_path / "logprobs.safetensors"
    with adding_server() as server:
        model = model_at(server.url, tmp_path / "kept")
        write_text_scores(model, ROWS, scores, logprobs)
        answered = len(server.answered)
        write_text_scores(model_at(server.url, tmp_path / "kept"), ROWS, scores, logprobs)
        assert len(server.answered) == answered == len(ROWS)
    tensors = load_file(scores)
    assert tensors["nll.0"].tolist() == pytest.approx([0.03, 0.09])
    assert tensors["nll.1"].tolist() == pytest.approx([0.08])
    assert tensors["likeliest.0"].tolist() == [3, 7]
    assert tensors["likeliest.1"].tolist() == [7]
    assert tensors["tokens.0"].tolist() == [[3, 7], [9, 7]]
    assert tensors["logprobs.0"].flatten().tolist() == pytest.approx([-0.03, -0.07, -0.09, -0.07])
    assert {name: tensor.dtype for name, tensor in tensors.items() if name.endswith(".1")} == {
        "nll.1": torch.float32,
        "likeliest.1": torch.int64,
        "tokens.1": torch.int32,
        "logprobs.1": torch.float32,
    }
    matrix = load_file(logprobs)["prompt.0"]
    assert matrix.shape == (2, 10)
    places = (~matrix.isnan()).nonzero().tolist()
    known = {(place, token): float(matrix[place, token]) for place, token in places}
    assert known == pytest.approx({(0, 3): -0.03, (0, 7): -0.07, (1, 7): -0.07, (1, 9): -0.09})


def test_first_rows_are_read_twice(tmp_path: Path) -> None:
    rows = [[5, 3, 9], [2, 8], [4, 4], *([[1, token] for token in range(20, 29)])]
    scores = tmp_path / "text.safetensors"
    with adding_server() as server:
        write_text_scores(model_at(server.url, tmp_path / "kept"), rows, scores, repeats=True)
        assert len(server.answered) == len(rows) + rows_to_repeat(len(rows)) == 15
    tensors = load_file(scores)
    for name in ("nll", "likeliest", "tokens", "logprobs"):
        repeated = [number for number in range(len(rows)) if f"again.{name}.{number}" in tensors]
        assert repeated == [0, 1, 2]
        assert tensors[f"again.{name}.1"].tolist() == tensors[f"{name}.1"].tolist()
    assert [rows_to_repeat(count) for count in (1, 2, 8, 32)] == [1, 2, 2, 8]


def test_long_rows_are_few_at_a_time() -> None:
    with adding_server() as server:
        model = model_at(server.url)
        short, long = (Question(prompt=[1] * length, parameters=TEXT) for length in (64, 8192))
        task = Question(prompt=[1] * 8192)
        assert [model.at_once([each]) for each in (short, long, task)] == [32, 8, 32]


def test_tokens_of_each_place_are_distinct() -> None:
    """vLLM lists the row's own token first, and again if it is among the likeliest."""
    tokens = np.array([3, 7, 3, 5, 1, 2], dtype=np.int32)
    logprobs = np.array([-1.0, -0.5, -1.0, -9.0, -0.1, -0.2], dtype=np.float32)
    scores = scores_of_flat(tokens, logprobs, 2)
    assert scores.tokens.tolist() == [[3, 7, NO_TOKEN], [5, 1, 2]]
    assert scores.nll.tolist() == [1.0, 9.0]
    assert scores.likeliest.tolist() == [7, 1]
    again = scores_from_json(json.loads(json.dumps(scores_to_json(scores))))
    np.testing.assert_array_equal(again.tokens, scores.tokens)
    np.testing.assert_array_equal(again.logprobs, scores.logprobs)


def test_memory_of_a_row_is_bounded() -> None:
    assert top_tokens(384, 8192) == 384, "a small vocabulary is read whole"
    assert top_tokens(152_000, 8192) == 128
    assert top_tokens(152_000, 131_072) == 32
    assert top_tokens(152_000, 10_000_000) == 20
    assert top_tokens(384, 131_072) == 32


def test_tokens_without_ids_are_refused(tmp_path: Path) -> None:
    logprobs = {"token_logprobs": [None, -0.1, -0.1], "top_logprobs": [None, {"a": -0.2}, {}]}

    def reply(path: str, body: dict[str, object]) -> Sent:
        if path != "/v1/completions":
            return sound(path, body)
        return Sent(content={"choices": [{**choice(body), "logprobs": logprobs}]})

    with (
        replying(reply) as url,
        breaks(rules.NO_SCORES),
    ):
        write_text_scores(model_at(url), [[5, 3, 9]], tmp_path / "text.safetensors")
