"""Gradients computed layer by layer, and the weights of tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.models import configs, samples, save
from vexport.calibration import gradients
from vexport.calibration.gradients import Gradients, GradientSquares, token_weights_of
from vexport.calibration.inputs import Counted, CountedTokens
from vexport.calibration.smoothing import find_smoothing
from vexport.calibration.walk import LayerWalk
from vexport.checkpoint.index import read_index

ROWS = samples((16,) * 4)
TEXT = samples((16, 11, 16, 16))
# Octaves of the places in a row of 16 tokens: 0, 1, 2-3, 4-7, 8-15.
OCTAVES = 5


def gradient_of_last_token(
    self: Gradients, logits: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient as if the last token of the vocabulary were drawn at each place."""
    errors = torch.softmax(logits, -1)
    errors[..., -1] -= 1
    return errors * factors[:, None]


def token_weights(folder: Path) -> GradientSquares:
    smoothing, found = find_smoothing(
        LayerWalk(read_index(folder)), TEXT, smoothed=(), strength=0.0, weighs_tokens=True
    )
    assert not smoothing
    return found


def gradients_of_whole_model(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the mean square of each linear layer's output gradient, by octave of the place."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    squares, counts = dict[str, torch.Tensor](), torch.zeros(OCTAVES)

    def see(name: str) -> None:
        def keep(gradient: torch.Tensor) -> None:
            found = squares.setdefault(name, torch.zeros(OCTAVES))
            for place, token_gradient in enumerate(gradient[0]):
                found[place.bit_length()] += token_gradient.square().sum()

        def hook(module: torch.nn.Module, inputs: object, made: torch.Tensor) -> None:
            made.register_hook(keep)  # type: ignore[no-untyped-call]

        model.get_submodule(name).register_forward_hook(hook)

    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, torch.nn.Linear):
            see(name)
    for ids in TEXT.token_ids:
        logits = model(input_ids=torch.tensor([ids])).logits
        (-torch.log_softmax(logits, -1)[..., -1].sum()).backward()  # type: ignore[no-untyped-call]
        for place in range(len(ids)):
            counts[place.bit_length()] += 1
    return {name: found / counts for name, found in squares.items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(configs()["llama"], tmp_path / "llama")


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_token_weights_equal_whole_model_gradients(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).save_pretrained(llama)
    monkeypatch.setattr(Gradients, "_logits_gradient", gradient_of_last_token)
    monkeypatch.setattr(gradients, "KEPT_BYTES", 0)
    found, expected = token_weights(llama), gradients_of_whole_model(llama)
    assert found.keys() == expected.keys()
    for name, squares in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), squares, rtol=1e-3, atol=1e-5)


def test_infinite_gradients_give_no_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Gradients,
        "_logits_gradient",
        lambda self, logits, factors: torch.full_like(logits, torch.inf),
    )
    assert token_weights(llama) == {}


def test_token_weights_are_powers_of_two() -> None:
    known: GradientSquares = {"q": (300.0, 1.0, 1.0, 1.0), "k": (100.0, 0.0, 0.0, 0.0)}
    found = token_weights_of(known, ["q", "k", "elsewhere"], 8)
    # The square roots are 20 at the first token and 1 at the other seven: 27/8 on average.
    assert found is not None
    assert found.tolist() == [8.0] + [0.25] * 7
    # Tokens after the last octave have its weight.
    longer = token_weights_of(known, ["q"], 64)
    assert longer is not None
    assert bool((longer[1:] == longer[1]).all())
    assert token_weights_of(known, ["elsewhere"], 8) is None
    assert token_weights_of({"q": (0.0, 0.0)}, ["q"], 2) is None


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_gradient_draws_one_token_per_place(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk goes through each layer forward and backward."""
    drawn, draw = list[torch.Tensor](), Gradients._logits_gradient

    def keep(self: Gradients, logits: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        errors = draw(self, logits, factors)
        drawn.append((torch.softmax(logits, -1) - errors).float())
        return errors

    monkeypatch.setattr(Gradients, "_logits_gradient", keep)
    steps, walk = list[tuple[int, int]](), LayerWalk(read_index(llama))
    Gradients(walk, []).run(ROWS, lambda stage, done, total: steps.append((done, total)))
    depth = len(walk.layers)
    total = 2 * depth + 1  # with the head
    assert steps == [(done, total) for done in range(total + 1)]
    for row in drawn:
        answer = torch.nn.functional.one_hot(row.argmax(-1), row.shape[-1]).float()
        torch.testing.assert_close(row, answer, rtol=0, atol=0.02)


class CountedRows:
    """The parts of a walk that tell which tokens of its row count."""

    device = "cpu"

    def __init__(self, tokens: int, counted: Sequence[bool] | None) -> None:
        self.ids = [torch.zeros(1, tokens)] * 4
        self._counted = None if counted is None else CountedTokens.of(counted, "cpu")

    def counted_of(self, index: int) -> Counted:
        return self._counted


@pytest.mark.parametrize("counted", [None, [place % 3 > 0 for place in range(200)]])
def test_predictions_stand_for_all_counted_tokens(counted: Sequence[bool] | None) -> None:
    """In four rows, the mean square of a counted token's factors is 1."""
    walk = CountedRows(200, counted)
    chosen = Gradients(walk, [], prediction_step=4)  # type: ignore[arg-type]  # only these parts
    expected = torch.ones(200) if counted is None else torch.tensor(counted, dtype=torch.float32)
    squares = torch.zeros(200)
    for row in range(4):
        places, factors = chosen._predictions(row)
        assert places[:64].tolist() == expected.nonzero()[:64, 0].tolist()
        assert len(places) <= 64 + -(-(int(expected.sum()) - 64) // 4)
        squares[places] += factors.square() / 4
    assert squares.tolist() == expected.tolist()


@pytest.mark.usefixtures("matmul_in_model_dtype")
def test_logits_of_some_tokens_equal_those_of_all(llama: Path) -> None:
    walk = LayerWalk(read_index(llama))
    with walk.start(ROWS) as hidden:
        walk.forward(hidden)
        places = torch.tensor([2, 3, 11])
        some, whole = walk.logits(0, hidden[0], places), walk.logits(0, hidden[0])
    torch.testing.assert_close(some, whole[:, places], rtol=1e-2, atol=1e-2)
