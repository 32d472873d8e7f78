"""Reshape weights, activations and attention states into observations of quantization groups.

A weight is processed tile by tile, so that a large weight is never in memory twice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from vexport.observers.qparams import ObserverArgs, strategy_of

Layout = Callable[[torch.Tensor, ObserverArgs], torch.Tensor]

WEIGHT = "weight"
ACTIVATIONS = ("input", "output")
STATES = ("q", "k", "v")
KINDS: Mapping[str, str] = {
    WEIGHT: "weight",
    **dict.fromkeys(ACTIVATIONS, "activation"),
    **dict.fromkeys(STATES, "state"),
}


def flatten_for_calibration(
    value: torch.Tensor, base_name: str, args: ObserverArgs
) -> torch.Tensor:
    """Reshape `value` to (num_observations, *qparam_shape, group_size).

    `base_name` is "weight", "input", "output", "q", "k" or "v". The elements of the last dimension
    share a scale. The result is a view if possible. Raises ValueError if `base_name` does not
    support the strategy.
    """
    return layout_of(base_name, args)(value, args)


def layout_of(base_name: str, args: ObserverArgs) -> Layout:
    """Return the function that flattens this kind of tensor.

    Raises ValueError if the name or the strategy is unknown, or if they cannot be combined.
    """
    layout = _LAYOUTS.get((KINDS.get(base_name, base_name), strategy_of(args)))
    if layout is None:
        known = ", ".join(f"{kind}/{strategy}" for kind, strategy in _LAYOUTS)
        raise ValueError(
            f"observed value: got {base_name}/{strategy_of(args)}, need one of {known} "
            f"(activation: {' or '.join(ACTIVATIONS)}; state: {' or '.join(STATES)})"
        )
    return layout


def _groups(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    """Split columns of a weight or activation into groups: (rows or tokens, groups, group_size)."""
    columns, size = value.shape[-1], args.group_size
    if size is None or size <= 0 or columns % size:
        raise ValueError(f"{columns} columns: got group size {size}, need a divisor of the columns")
    return value.reshape(-1, columns // size, size)


def blocks_of(weight: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    """Return a weight's blocks (block rows, block columns, height, width).

    Incomplete blocks are padded with zeros. The result is a view if all blocks are complete.
    """
    assert args.block_structure is not None
    height, width = args.block_structure
    below, right = -weight.shape[0] % height, -weight.shape[1] % width
    padded = torch.nn.functional.pad(weight, (0, right, 0, below)) if below or right else weight
    return padded.reshape(
        padded.shape[0] // height, height, padded.shape[1] // width, width
    ).transpose(1, 2)


_LAYOUTS: Mapping[tuple[str, str], Layout] = {
    ("weight", "tensor"): lambda weight, _: weight.reshape(1, 1, -1),
    ("weight", "channel"): lambda weight, _: weight.reshape(1, weight.shape[0], 1, -1),
    ("weight", "group"): lambda weight, args: _groups(weight, args).unsqueeze(0),
    ("weight", "tensor_group"): lambda weight, args: _groups(weight, args).unsqueeze(0),
    ("weight", "block"): lambda weight, args: blocks_of(weight, args).flatten(2).unsqueeze(0),
    ("activation", "tensor"): lambda value, _: value.reshape(-1, 1, value.shape[-1]),
    # As in llm-compressor, each token position has a range over the batch. Tokens without a batch
    # dimension count as a batch of size 1.
    ("activation", "token"): lambda value, _: value,
    ("activation", "group"): _groups,
    ("activation", "tensor_group"): _groups,
    ("state", "tensor"): lambda states, _: (
        states.transpose(1, 2).flatten(2).flatten(0, 1).unsqueeze(1)
    ),
    ("state", "attn_head"): lambda states, _: states.transpose(1, 2).flatten(0, 1)[
        :, :, None, None
    ],
}


# Elements per tile: 8 MiB in float32.
TILE_ELEMENTS = 1 << 21
# Dimension of observations that is split into tiles: the first dimension of qparam_shape.
ROW_DIM = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """Observations of `shape` (num_observations, *qparam_shape, group_size), split into tiles.

    A tile contains all observations of some rows. The rows are the first dimension of qparam_shape.
    `cut` returns the tiles in order.
    """

    cut: Callable[[], Iterable[torch.Tensor]]
    shape: tuple[int, ...]
    device: torch.device

    @property
    def qparam_shape(self) -> tuple[int, ...]:
        """Shape of the scales, with an element for each group."""
        return self.shape[1:-1]

    def by_rows(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each tile with its rows, as a slice of the first dimension of qparam_shape."""
        start = 0
        for tile in self.cut():
            rows = slice(start, start + tile.shape[ROW_DIM])
            start = rows.stop
            yield rows, tile


def tiles_of_observations(observations: torch.Tensor) -> Tiles:
    """Return tiles of flattened observations, as views.

    Two dimensions (tokens, hidden) count as a single observation with a group per token.
    """
    if observations.ndim == 2:
        observations = observations.unsqueeze(0)
    size = _tile_length(observations, ROW_DIM)
    return Tiles(
        lambda: torch.split(observations, size, dim=ROW_DIM),
        observations.shape,
        observations.device,
    )


def tiles_of(value: torch.Tensor, base_name: str, args: ObserverArgs) -> Tiles:
    """Return the tiles of a weight, activation or attention state.

    If flattening a weight requires a copy, it is copied tile by tile.
    """
    strategy = strategy_of(args)
    if base_name != WEIGHT or strategy == "tensor":
        return tiles_of_observations(flatten_for_calibration(value, base_name, args))
    shape = flatten_for_calibration(value.to("meta"), base_name, args).shape
    if strategy == "block":
        return Tiles(lambda: _block_tiles(value, args), shape, value.device)
    parts = torch.split(value, _tile_length(value, 0))
    return Tiles(
        lambda: (flatten_for_calibration(rows, base_name, args) for rows in parts),
        shape,
        value.device,
    )


def _block_tiles(weight: torch.Tensor, args: ObserverArgs) -> Iterator[torch.Tensor]:
    """Yield tiles of block rows.

    Each tile overwrites the previous tile in the same memory, so that the heap is not fragmented.
    """
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


def tokens_in(observed: torch.Tensor, base_name: str) -> int:
    """Count the tokens of an activation (..., hidden) or a state (batch, heads, tokens, size).

    Returns 0 for a weight.
    """
    if base_name == WEIGHT or not observed.numel():
        return 0
    if base_name in STATES:
        return observed.shape[0] * observed.shape[2]
    return observed.numel() // observed.shape[-1]


def get_observer_token_count(module: torch.nn.Module) -> Counter[str]:
    """Return the token counts of all `input_observer`s in `module`, by their modules' names."""
    counts: Counter[str] = Counter()
    for name, submodule in module.named_modules():
        owner, _, last = name.rpartition(".")
        if last == "input_observer":
            counts[owner] = int(getattr(submodule, "tokens", 0))
    return counts


SIGN = -(2**15)
# 16-bit floats: a sign bit, then bits that grow with the magnitude. Infinity and NaN have the
# largest magnitudes.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def channel_extremes(value: torch.Tensor) -> torch.Tensor:
    """Return the minima and maxima over all tokens of an activation (..., channels).

    The result has shape (2, channels) and the dtype of the activation. If a channel contains NaN,
    its minimum or maximum is NaN. The activation must not be empty.
    """
    flat = value.detach().reshape(-1, value.shape[-1])
    if flat.dtype not in SIXTEEN_BIT:
        return torch.stack((flat.amin(0), flat.amax(0)))
    bits = flat.contiguous().view(torch.int16)
    # As integers, positive floats are in ascending order and above all negative floats. Negative
    # floats are in descending order.
    highest, lowest = bits.amax(0), bits.amin(0)
    most_negative = (bits ^ SIGN).amax(0)
    low = torch.where(most_negative >= 0, most_negative ^ SIGN, lowest)
    high = torch.where(highest >= 0, highest, lowest)
    return torch.stack((low, high)).view(flat.dtype)
