"""Layers one after another, while what will be looked at of later ones is being read."""

from collections.abc import Callable, Iterator, Sequence

from vexport.checks.vllm.view import FusedLinear

# So many layers are being read while one is looked at: a disk or server answers them at once.
AHEAD = 32


def read_ahead(layers: Sequence[FusedLinear], begin: Callable[[FusedLinear], None]) -> Iterator[FusedLinear]:
    """The layers; before each, `begin` starts to read what is needed of the one that is AHEAD of it."""
    for number, layer in enumerate(layers):
        if number + AHEAD < len(layers):
            begin(layers[number + AHEAD])
        yield layer
