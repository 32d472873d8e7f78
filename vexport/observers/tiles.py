"""Observations a tile at a time: nothing of a large weight is in memory twice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vexport.observers.args import ObserverArgs, strategy_of
from vexport.observers.flatten import WEIGHT, blocks_of, flatten_for_calibration, permutation

# Elements of a tile: 8 MiB in float32, of which a search without compiled code holds a few at once.
TILE_ELEMENTS = 1 << 21
ROWS = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """Observations of `shape` (num_observations, *qparam_shape, group_size) cut into pieces.

    `shared` says that every tile holds elements of all groups, so that results are accumulated; otherwise
    tiles hold the groups of some rows, the first dimension of qparam_shape. `order` is how the columns of a
    weight were permuted.
    """

    cut: Callable[[], Iterator[torch.Tensor]]
    shape: tuple[int, ...]
    device: torch.device
    shared: bool
    order: torch.Tensor | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        """qparam_shape."""
        return self.shape[1:-1]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.cut()

    def by_rows(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows of qparam_shape, their tile) of tiles that are not shared."""
        start = 0
        for tile in self.cut():
            rows = slice(start, start + tile.shape[ROWS])
            start = rows.stop
            yield rows, tile


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
    return Tiles(
        lambda: iter(torch.split(observations, size, dim=dim)),
        observations.shape,
        observations.device,
        shared=dim != ROWS,
    )


def tiles_of(value: torch.Tensor, base_name: str, args: ObserverArgs, g_idx: torch.Tensor | None) -> Tiles:
    """Tiles of a weight, activation or attention state; where flattening copies, it copies one tile."""
    strategy = strategy_of(args)
    if base_name != WEIGHT or strategy == "tensor":
        return tiles_of_observations(flatten_for_calibration(value, base_name, args))
    shape = flatten_for_calibration(value.to("meta"), base_name, args).shape
    if strategy == "block":
        return Tiles(lambda: _block_tiles(value, args), shape, value.device, shared=False)
    order = permutation(g_idx, value, base_name, args)

    def cut() -> Iterator[torch.Tensor]:
        for rows in torch.split(value, _tile_length(value, 0)):
            yield flatten_for_calibration(
                rows if order is None else rows.index_select(1, order), base_name, args
            )

    return Tiles(cut, shape, value.device, shared=False, order=order)


def _block_tiles(weight: torch.Tensor, args: ObserverArgs) -> Iterator[torch.Tensor]:
    """Rows of blocks, each in the memory of the one before: new tiles would fragment the heap."""
    assert args.block_structure is not None
    height = args.block_structure[0]
    kept = weight.new_empty(0)
    for rows in torch.split(weight, max(1, _tile_length(weight, 0) // height) * height):
        blocks = blocks_of(rows, args)
        if kept.shape != blocks.shape:
            kept = torch.empty(blocks.shape, dtype=weight.dtype, device=weight.device)
        yield kept.copy_(blocks).reshape(1, *blocks.shape[:2], -1)


def _tile_length(value: torch.Tensor, dim: int) -> int:
    others = max(1, value.numel() // max(1, value.shape[dim]))
    return max(1, TILE_ELEMENTS // others)
