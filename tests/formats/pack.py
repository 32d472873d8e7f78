"""Packs one weight with the kernels, a few rows at a time, as tensors."""

import numpy as np
import torch

from vexport.checkpoint.tensors import as_tensor
from vexport.formats.packing.base import STORAGES, Array, PackingInputs, Scales, kernel_input
from vexport.formats.schemes import Scheme
from vexport.numerics.codes import largest_magnitude
from vexport.observers import QParamsDict
from vexport.records import LinearPlan

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def bits_of(weight: torch.Tensor) -> Array:
    """The weight as a reader gives it."""
    return weight.numpy() if weight.dtype == torch.float32 else weight.view(torch.uint16).numpy()


def as_scales(qparams: QParamsDict) -> Scales:
    """What an observer found, as the packings take it."""
    global_scale = qparams["global_scale"]
    return Scales(
        scale=qparams["scale"].to(torch.float32).numpy(),
        zero_point=qparams["zero_point"].to(torch.float32).numpy(),
        global_scale=None if global_scale is None else global_scale.to(torch.float32).numpy(),
    )


def pack(scheme: Scheme, weight: torch.Tensor, scales: Scales | None) -> dict[str, torch.Tensor]:
    """Every stored tensor of a weight, the rows packed in several runs and in reverse order.

    Without `scales` those of the rows' ranges are made while they are packed.
    """
    rows, columns = weight.shape
    member = LinearPlan(name="layer", weight="layer.weight", out_features=rows, in_features=columns)
    dtype, view, args = NAMES[weight.dtype], bits_of(weight), scheme.args.weights
    known = PackingInputs(scales=scales)
    if scales is None and args.shares_scale:
        known = PackingInputs(
            largest=np.float32(largest_magnitude(kernel_input(view).reshape(-1), STORAGES[dtype]))
        )
    packing = scheme.format.packing(member, dtype, args, known)
    step = packing.multiple * max(1, rows // packing.multiple // 3)
    parts = {
        start: packing.pack(kernel_input(view[start : start + step]), start)
        for start in reversed(range(0, rows, step))
    }
    first, *others = (
        spec for spec in scheme.layout(member, dtype) if not spec.name.startswith("layer.input")
    )
    data = {first: np.concatenate([parts[start].reshape(-1).view(np.uint8) for start in sorted(parts)])}
    for spec in others:
        tensor = np.ascontiguousarray(packing.tensor(spec.name.removeprefix("layer.")))
        data[spec] = tensor.reshape(-1).view(np.uint8)
    return {spec.name.removeprefix("layer."): as_tensor(value, spec) for spec, value in data.items()}
