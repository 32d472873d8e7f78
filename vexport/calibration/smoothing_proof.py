"""Is a smoothing one: does each layer of the source compute the same bits with and without it?

That exponents come in pairs does not show it: a pair may be of tensors that have nothing to do with each
other, or leave out one of those that read the scaled channels.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from vexport.architectures.fusion import moe_layer
from vexport.architectures.text_config import text_config
from vexport.calibration.capture import LayerCall
from vexport.calibration.hidden import hidden_states
from vexport.calibration.layerwise import Batch, Failure, LayerByLayer
from vexport.calibration.model import joined
from vexport.calibration.watch import Watched
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.smoothed import reader_of
from vexport.checkpoint.tensors import read_tensor
from vexport.types import Smoothing

# Powers of two are undone for any input or for none: tokens from all over the vocabulary.
TOKENS = 16


def changed_by(index: SourceIndex, smoothing: Mapping[str, Smoothing], device: str) -> list[str]:
    """The decoder layers that compute something else when smoothed, and the smoothed tensors of no layer.

    InputError where the model cannot run layer by layer, or a tensor does not fit its exponents;
    CheckpointFailed where what the source computes is not finite.
    """
    size = text_config(index.config).get("vocab_size")
    vocabulary = size if isinstance(size, int) and size > 0 else 1
    ids = torch.arange(TOKENS)[None] * vocabulary // TOKENS
    nothing = Watched(inputs={}, importance={}, layers={})
    with torch.no_grad(), Reader() as plain, reader_of(smoothing) as reader, hidden_states() as hidden:
        batches = [Batch(ids=ids, rows=(1,))]
        model = _Compared(index, plain, batches, hidden, nothing, trust_remote_code=False, device=device)
        model.prepare(index, smoothing, reader)
        failure = model.run(lambda done, total: None)
    if failure:
        raise failure.found.error(failure.row)
    return [*model.changed, *sorted(smoothing.keys() - model.applied)]


class _Compared(LayerByLayer):
    """Runs the source as it is; every layer once more with its smoothed tensors."""

    def prepare(self, index: SourceIndex, smoothing: Mapping[str, Smoothing], reader: Reader) -> None:
        """`reader` gives the smoothed tensors."""
        self.changed: list[str] = []
        self.applied: set[str] = set()
        self.smoothed = reader
        self.tensors = {name: index.tensors[name] for name in smoothing if name in index.tensors}

    def _layer(self, number: int, calls: Sequence[LayerCall]) -> Failure | None:
        layer, name = self.layers[number], f"{self.name}.{number}"
        before = self._states(0).clone()
        failure = super()._layer(number, calls)
        own = dict(self._own(layer, name))
        if failure is None and own:
            for parameter, stored in own.items():
                value = read_tensor(self.smoothed, self.tensors[stored])
                target = layer.get_parameter(parameter)
                target.data = value.to(target.device, target.dtype, copy=True)
            if not torch.equal(calls[0].run(layer, before).cpu(), self._states(0).cpu()):
                self.changed.append(name)
            self.applied.update(own.values())
        return failure

    def _own(self, layer: torch.nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
        """The layer's smoothed parameters and their tensors. Not every token reaches an expert: none is."""
        for name, _ in layer.named_parameters():
            stored = self.weights.plain_tensor(joined(prefix, name))
            if stored in self.tensors and moe_layer(joined(prefix, name).rpartition(".")[0]) is None:
                yield name, stored
