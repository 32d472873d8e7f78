"""Observations a tile at a time: nothing of a large weight is in memory twice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from vexport.observers.args import ObserverArgs, strategy_of
from vexport.observers.flatten import WEIGHT, blocks_of, flatten_for_calibration, permutation

# Elements of a tile: 2 MiB in float32, of which a search holds a few at once.
TILE_ELEMENTS = 1 << 19
ROWS = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """Observations (num_observations, *qparam_shape, group_size) cut into pieces.

    `shared` says that every tile holds elements of all groups, so that results are accumulated; otherwise
    tiles hold different groups and results are concatenated along the first dimension of qparam_shape.
    `order` is how the columns of a weight were permuted; `weight` is the weight (rows, columns) itself where
    they were not.
    """

    cut: Callable[[], Iterator[torch.Tensor]]
    shared: bool
    order: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.cut()


def tiles_of_observations(observations: torch.Tensor) -> Tiles:
    """Views of what is flattened already; two dimensions (tokens, hidden) are one observation of each."""
    if observations.ndim == 2:
        observations = observations.unsqueeze(0)
    dim = ROWS
    if observations.shape[0] > 1:
        dim = 0
    elif tuple(observations.shape[:-1]) == (1, 1):
        dim = 2
    size = _tile_length(observations, dim)
    return Tiles(lambda: iter(torch.split(observations, size, dim=dim)), shared=dim != ROWS)


def tiles_of(value: torch.Tensor, base_name: str, args: ObserverArgs, g_idx: torch.Tensor | None) -> Tiles:
    """Tiles of a weight, activation or attention state; where flattening copies, it copies one tile."""
    if base_name == WEIGHT and strategy_of(args) == "block":
        return Tiles(lambda: _block_tiles(value, args), shared=False, weight=value)
    order = permutation(g_idx, value, base_name, args)
    if order is None:
        tiles = tiles_of_observations(flatten_for_calibration(value, base_name, args))
        return replace(tiles, weight=value if base_name == WEIGHT else None)

    def cut() -> Iterator[torch.Tensor]:
        for rows in torch.split(value, _tile_length(value, 0)):
            yield flatten_for_calibration(rows.index_select(1, order), base_name, args)

    return Tiles(cut, shared=False, order=order)


def _block_tiles(weight: torch.Tensor, args: ObserverArgs) -> Iterator[torch.Tensor]:
    """Rows of blocks, each in the memory of the one before: new tiles would fragment the heap."""
    assert args.block_structure is not None
    high = args.block_structure[0]
    kept = weight.new_empty(0)
    for rows in torch.split(weight, max(1, _tile_length(weight, 0) // high) * high):
        blocks = blocks_of(rows, args)
        if kept.shape != blocks.shape:
            kept = torch.empty(blocks.shape, dtype=weight.dtype, device=weight.device)
        yield kept.copy_(blocks).reshape(1, *blocks.shape[:2], -1)


def _tile_length(value: torch.Tensor, dim: int) -> int:
    others = max(1, value.numel() // max(1, value.shape[dim]))
    return max(1, TILE_ELEMENTS // others)
