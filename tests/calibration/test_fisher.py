"""Gradients layer by layer are those of the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.make import samples
from tests.calibration.models import configs, save
from vexport.calibration import gradients
from vexport.calibration.gradients import Again, Gradients, walk_back
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import read_index

TEXT = samples((16,) * 4)


class Seen:
    """Keeps the gradients by each layer's norm."""

    def __init__(self) -> None:
        self.found = dict[int, list[torch.Tensor]]()

    @contextmanager
    def watching(self, layer: Layer) -> Iterator[None]:
        def see(module: torch.nn.Module, inputs: object, made: torch.Tensor) -> None:
            made.register_hook(self.found.setdefault(layer.number, []).append)  # type: ignore[no-untyped-call]

        with layer.module.get_submodule("post_attention_layernorm").register_forward_hook(see):
            yield

    def leave(self, layer: Layer, again: Again) -> None:
        assert again().shape == (1, 16, 64)


@pytest.mark.usefixtures("own_products")
def test_gradients_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[torch.Tensor](), Gradients._errors

    def always_the_last(self: Gradients, logits: torch.Tensor) -> torch.Tensor:
        """As where the last token of the vocabulary is drawn everywhere."""
        drawn.append(draw(self, logits))
        errors = torch.softmax(logits, -1)
        errors[..., -1] -= 1
        return errors

    monkeypatch.setattr(Gradients, "_errors", always_the_last)
    folder = save(configs()["llama"], tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder)
    steps, seen = list[tuple[int, int]](), Seen()
    monkeypatch.setattr(gradients, "ENTERED_BYTES", 0)
    walk = LayerWalk(read_index(folder))
    walk_back(walk, TEXT, [seen], lambda stage, done, total: steps.append((done, total)))
    depth = len(walk.layers)
    assert steps == [(done + 1, 2 * depth) for done in range(2 * depth)]
    expected = dict[int, list[torch.Tensor]]()
    for number, layer in enumerate(model.model.layers):

        def see(module: torch.nn.Module, inputs: object, made: torch.Tensor, number: int = number) -> None:
            made.register_hook(expected.setdefault(number, []).append)  # type: ignore[no-untyped-call]

        layer.post_attention_layernorm.register_forward_hook(see)
    for ids in TEXT.token_ids:
        logits = model(input_ids=torch.tensor([ids])).logits
        (-torch.log_softmax(logits, -1)[..., -1].sum()).backward()  # type: ignore[no-untyped-call]
    assert seen.found.keys() == expected.keys() == set(range(depth))
    for number, each in expected.items():
        for found, one in zip(seen.found[number], each, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-5)
    # What is drawn without us: at each token one of the model's own answers.
    last = torch.softmax(model(input_ids=torch.tensor([TEXT.token_ids[-1]])).logits, -1) - drawn[-1]
    torch.testing.assert_close(last, torch.nn.functional.one_hot(last.argmax(-1), last.shape[-1]).float())
