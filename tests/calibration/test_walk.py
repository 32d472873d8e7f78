"""The walk through layers: calls of watchers, and the groups of each layer."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.calibration.models import configs, plan_for, samples, save
from vexport.calibration.walk import Layer, LayerWalk
from vexport.checkpoint.index import read_index
from vexport.checkpoint.reader import Reader
from vexport.records import TensorInfo

TEXT = samples((5, 7))
LAYERS = 3

pytestmark = pytest.mark.usefixtures("matmul_in_model_dtype")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(configs()["llama"], tmp_path / "llama")


class CallRecorder:
    """Watcher that records its calls and states. Hooks count the forwards of layers."""

    def __init__(self, fails_in: int = -1) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.states: list[torch.Tensor] = []
        self.forwards = 0
        self._fails_in = fails_in

    def enter(self, layer: Layer) -> None:
        self.calls.append(("enter", layer.number))
        assert not any(parameter.is_meta for parameter in layer.module.parameters(recurse=False))
        layer.watching.callback(layer.module.register_forward_hook(self._count).remove)

    def _count(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        self.forwards += 1

    def row(self, index: int, hidden: torch.Tensor) -> None:
        self.calls.append(("row", index))
        self.states.append(hidden.clone())

    def leave(self, layer: Layer) -> None:
        self.calls.append(("leave", layer.number))
        if layer.number == self._fails_in:
            raise KeyboardInterrupt


def test_watchers_see_all_rows_and_layers(llama: Path) -> None:
    """The states at the end are the model's logits."""
    walk = LayerWalk(read_index(llama))
    watcher = CallRecorder()
    with walk.start(TEXT) as hidden:
        walk.forward(hidden, watcher)
        walk.run_head(hidden, watcher)
    expected: list[tuple[object, ...]] = []
    for number in range(LAYERS + 1):
        expected += [("enter", number), ("row", 0), ("row", 1), ("leave", number)]
    assert watcher.calls == expected
    assert watcher.forwards == 2 * (LAYERS + 1)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    with torch.no_grad():
        for ids, logits in zip(TEXT.token_ids, watcher.states[-2:], strict=True):
            assert torch.equal(model(input_ids=torch.tensor([ids])).logits, logits)


class PrefetchRecorder:
    """Watcher that records, for each layer, the layers with weights and the tensors read ahead."""

    def __init__(self, walk: LayerWalk, ahead: list[str]) -> None:
        self.loaded: list[list[int]] = []
        self.ahead: list[set[str]] = []
        self._walk = walk
        self._ahead = ahead

    def enter(self, layer: Layer) -> None:
        self.loaded.append(
            [
                number
                for number, module in enumerate(self._walk.layers)
                if not any(parameter.is_meta for parameter in module.parameters())
            ]
        )
        self.ahead.append(set(self._ahead))
        self._ahead.clear()

    def row(self, index: int, hidden: torch.Tensor) -> None:
        pass

    def leave(self, layer: Layer) -> None:
        pass


def test_next_layer_is_read_ahead(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are in the page cache, and only a single layer has weights."""
    index, ahead, prefetch = read_index(llama), list[str](), Reader.prefetch

    def record_and_prefetch(reader: Reader, tensors: Iterable[TensorInfo]) -> None:
        chosen = list(tensors)
        ahead.extend(tensor.name for tensor in chosen)
        prefetch(reader, chosen)

    monkeypatch.setattr(Reader, "prefetch", record_and_prefetch)
    walk = LayerWalk(index)
    watcher = PrefetchRecorder(walk, ahead)
    with walk.start(TEXT) as hidden:
        walk.forward(hidden, watcher)
    assert watcher.loaded == [[0], [1], [2]]
    expected = [
        {name for name in index.tensors if name.startswith(f"model.layers.{number}.")}
        for number in (1, 2, LAYERS)
    ]
    assert watcher.ahead == expected


def test_unselected_rows_do_not_change(llama: Path) -> None:
    walk = LayerWalk(read_index(llama))
    watcher = CallRecorder()
    with walk.start(TEXT) as hidden:
        before = hidden[0].clone()
        walk.forward(hidden, watcher, rows=[1])
        assert torch.equal(hidden[0], before)
    assert watcher.calls.count(("row", 1)) == LAYERS
    assert ("row", 0) not in watcher.calls


def test_hooks_are_removed_after_interrupt(llama: Path) -> None:
    walk = LayerWalk(read_index(llama))
    with pytest.raises(KeyboardInterrupt), walk.start(TEXT) as hidden:
        walk.forward(hidden, CallRecorder(fails_in=1))
    assert not any(module._forward_hooks for module in walk.model.modules())


def test_groups_belong_to_layers(llama: Path) -> None:
    index, plan = plan_for(llama, head=True)
    groups = LayerWalk(index).places.by_layer(plan.groups)
    assert len(groups) == LAYERS + 1
    for number in range(LAYERS):
        assert {group.name.rpartition(f"layers.{number}.")[0] for group in groups[number]} == {
            "model."
        }
    assert [group.name for group in groups[-1]] == ["lm_head"]
