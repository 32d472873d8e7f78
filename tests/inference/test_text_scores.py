"""Rows of a text that a server scores, and the files that evaluations read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.inference.misbehaving import adding_server
from tests.inference.replying import Sent, choice, replying, sound
from vexport.errors import EnvironmentFault
from vexport.inference.endpoint.model import EndpointModel
from vexport.inference.endpoint.server import Server
from vexport.inference.kept_answers import KeptAnswers
from vexport.inference.text_scores import write_text_scores
from vexport.records import Endpoint, silent

ROWS = [[5, 3, 9], [2, 8]]


def model_at(url: str, kept: Path | None = None) -> EndpointModel:
    server = Server(Endpoint(url=url, model="adder", request_timeout=20, retry_seconds=0))
    return EndpointModel(server, KeptAnswers(kept), silent, vocabulary=100)


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
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "nll.0": torch.float32,
        "nll.1": torch.float32,
        "likeliest.0": torch.int64,
        "likeliest.1": torch.int64,
    }
    matrix = load_file(logprobs)["prompt.0"]
    assert matrix.shape == (2, 10)
    places = (~matrix.isnan()).nonzero().tolist()
    known = {(place, token): float(matrix[place, token]) for place, token in places}
    assert known == pytest.approx({(0, 3): -0.03, (0, 7): -0.07, (1, 7): -0.07, (1, 9): -0.09})


def test_tokens_without_ids_are_refused(tmp_path: Path) -> None:
    logprobs = {"token_logprobs": [None, -0.1, -0.1], "top_logprobs": [None, {"a": -0.2}, {}]}

    def reply(path: str, body: dict[str, object]) -> Sent:
        if path != "/v1/completions":
            return sound(path, body)
        return Sent(content={"choices": [{**choice(body), "logprobs": logprobs}]})

    with (
        replying(reply) as url,
        pytest.raises(EnvironmentFault, match="tokens without their ids.*--task"),
    ):
        write_text_scores(model_at(url), [[5, 3, 9]], tmp_path / "text.safetensors")
