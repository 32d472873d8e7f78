"""Work on a weight a few rows at a time, so that float32 copies stay small."""

from collections.abc import Iterator

import torch

# Elements of a weight that are in float32 at once (16 MiB).
TILE_ELEMENTS = 1 << 22


def row_tiles(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows, those rows in float32) over a matrix."""
    rows = max(1, TILE_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, min(start + rows, weight.shape[0]))
        yield part, weight[part].to(torch.float32)
