"""Gradients layer by layer are those of the whole model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.make import samples
from tests.calibration.models import configs, save
from vexport.calibration.capture import LayerCall
from vexport.calibration.fisher import UpAndBack
from vexport.calibration.forward import make_batches
from vexport.calibration.hidden import hidden_states
from vexport.calibration.watch import Watched
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader

TEXT = samples((16,) * 4)


class Seen(UpAndBack):
    """Draws the last token of the vocabulary everywhere, and keeps the gradients by each layer's norm."""

    found: dict[int, list[torch.Tensor]]

    def visit(self, number: int, calls: Sequence[LayerCall], flow: Callable[[], None]) -> None:
        norm = self.layers[number].get_submodule("post_attention_layernorm")

        def keep(gradient: torch.Tensor) -> None:
            self.found.setdefault(number, []).append(gradient)

        def see(module: torch.nn.Module, inputs: object, made: torch.Tensor) -> None:
            made.register_hook(keep)  # type: ignore[no-untyped-call]

        with norm.register_forward_hook(see):
            flow()

    def _errors(self, logits: torch.Tensor) -> torch.Tensor:
        self.drawn = super()._errors(logits)
        errors = torch.softmax(logits, -1)
        errors[..., -1] -= 1
        return errors


@pytest.mark.usefixtures("own_products")
def test_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    folder = save(configs()["llama"], tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder)
    steps = list[tuple[int, int]]()
    nothing = Watched(inputs={}, importance={}, layers={})
    with torch.no_grad(), Reader() as reader, hidden_states() as hidden:
        batches = make_batches(TEXT, 1)
        seen = Seen(
            read_index(folder), reader, batches, hidden, nothing, trust_remote_code=False, device="cpu"
        )
        seen.found = {}
        seen.run_and_back(lambda done, total: steps.append((done, total)), entered_bytes=0)
    depth = len(seen.layers)
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
    for number, gradients in expected.items():
        for found, one in zip(seen.found[number], gradients, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-5)
    # What is drawn without us: at each token one of the model's own answers.
    last = torch.softmax(model(input_ids=torch.tensor([TEXT.token_ids[-1]])).logits, -1) - seen.drawn
    torch.testing.assert_close(last, torch.nn.functional.one_hot(last.argmax(-1), last.shape[-1]).float())
