"""Brings a weight, an activation or an attention state into observations of quantization groups."""

from collections.abc import Callable, Mapping

import torch

from vexport.observers.args import ObserverArgs


def flatten_for_calibration(value: torch.Tensor, base_name: str, args: ObserverArgs) -> torch.Tensor:
    """Reshape `value` to (num_observations, *qparam_shape, group_size).

    `base_name` is "weight", "input", "output", "q", "k" or "v"; the elements of the last dimension share
    one scale. Raises ValueError for a pair of base name and strategy that has no meaning.
    """
    kind = (
        "activation"
        if base_name in ("input", "output")
        else "state"
        if base_name in ("q", "k", "v")
        else base_name
    )
    strategy = str(getattr(args.strategy, "value", args.strategy))
    layout = _LAYOUTS.get((kind, strategy))
    if layout is None:
        known = ", ".join(f"{k}/{s}" for k, s in _LAYOUTS)
        raise ValueError(f"flatten_for_calibration: got {base_name}/{strategy}, need one of {known}")
    return layout(value, args)


def _weight_tensor(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    return value.reshape(1, 1, -1)


def _weight_channel(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    return value.reshape(1, value.shape[0], 1, -1)


def _weight_group(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    rows, columns = value.shape
    size = _group_size(args, columns)
    return value.reshape(1, rows, columns // size, size)


def _weight_block(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    assert args.block_structure is not None
    high, wide = args.block_structure
    rows, columns = value.shape
    padded = torch.nn.functional.pad(value, (0, -columns % wide, 0, -rows % high))
    blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    return blocks.transpose(1, 2).reshape(1, blocks.shape[0], blocks.shape[2], high * wide)


def _activation_tensor(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    return value.reshape(-1, 1, value.shape[-1])


def _activation_token(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    return value


def _activation_group(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    columns = value.shape[-1]
    size = _group_size(args, columns)
    return value.reshape(-1, columns // size, size)


def _state_tensor(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    return value.transpose(1, 2).reshape(-1, 1, value.shape[1] * value.shape[3])


def _state_heads(value: torch.Tensor, args: ObserverArgs) -> torch.Tensor:
    heads, size = value.shape[1], value.shape[3]
    return value.transpose(1, 2).reshape(-1, heads, 1, 1, size)


def _group_size(args: ObserverArgs, columns: int) -> int:
    if args.group_size is None or args.group_size <= 0 or columns % args.group_size:
        raise ValueError(
            f"{columns} columns: got group size {args.group_size}, need a divisor of the columns"
        )
    return args.group_size


_LAYOUTS: Mapping[tuple[str, str], Callable[[torch.Tensor, ObserverArgs], torch.Tensor]] = {
    ("weight", "tensor"): _weight_tensor,
    ("weight", "channel"): _weight_channel,
    ("weight", "group"): _weight_group,
    ("weight", "tensor_group"): _weight_group,
    ("weight", "block"): _weight_block,
    ("activation", "tensor"): _activation_tensor,
    ("activation", "token"): _activation_token,
    ("activation", "group"): _activation_group,
    ("activation", "tensor_group"): _activation_group,
    ("state", "tensor"): _state_tensor,
    ("state", "attn_head"): _state_heads,
}
