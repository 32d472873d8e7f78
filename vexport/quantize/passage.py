"""Streams of text, and their way through one decoder layer: how far from the source's they come out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vexport.calibration.attention import CachedStates, watching_attention
from vexport.calibration.capture import LayerCall
from vexport.calibration.hidden import HiddenStates
from vexport.calibration.weights import Weights
from vexport.numerics.ranks import add_up, gather
from vexport.quantize.applied import QuantizedLayer
from vexport.quantize.rounded_layers import RoundedLayers
from vexport.quantize.text_rows import TextRows
from vexport.rounding.settings import Recipe
from vexport.types import KeyValueRanges


@dataclass(slots=True, kw_only=True)
class Branch:
    """A recipe, its stream's hidden states between two layers, and what it rounded.

    `outside` are the quantized layers behind the decoder layers.
    """

    recipe: Recipe
    hidden: HiddenStates
    done: RoundedLayers
    outside: list[QuantizedLayer] = field(default_factory=list)
    divergence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The layer, how it is called for each row of this rank, and the stream's states, which are replaced.

    The first `rows.compared` rows are compared with `source`, the source's states behind the layer.
    """

    layer: torch.nn.Module
    name: str
    weights: Weights
    calls: Sequence[LayerCall]
    hidden: HiddenStates
    source: HiddenStates
    rows: TextRows
    device: str
    _errors: list[tuple[float, float]] = field(default_factory=list)
    _cached: dict[str, CachedStates] = field(default_factory=dict)

    def run(self, position: int) -> None:
        """Run one row of this rank."""
        states = self.hidden[position].to(self.device)
        self.hidden[position] = self.calls[position].run(self.layer, states)
        if self.rows.own[position] < self.rows.compared:
            exact = self.source[position].to(torch.float32)
            noise = (self.hidden[position].to(torch.float32) - exact).square().sum()
            self._errors.append((float(exact.square().sum()), float(noise)))

    @contextmanager
    def watching_cache(self) -> Iterator[None]:
        """Within the block what rows would write to the KV cache is noted."""
        with watching_attention(self.layer, self.name, self.weights.stored_name, self._cached):
            yield

    def outcome(self) -> tuple[float, Mapping[str, KeyValueRanges]]:
        """|h~ - h|^2 / |h|^2 of the compared rows, and what was noted of the KV cache. All ranks call."""
        add_up(self._cached)
        every = [one for errors in gather(self._errors) for one in errors]
        signal = sum(one for one, _ in every)
        error = sum(one for _, one in every) / signal if signal else 0.0
        return error, {name: states.ranges() for name, states in self._cached.items()}
