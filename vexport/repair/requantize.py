"""Quantizes one layer again from the source, by min-max ranges and compressed-tensors' own rounding."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from compressed_tensors.compressors import BaseCompressor

from vexport.checks.vllm.layers import Layer
from vexport.fidelity.dequantize import vllm_storage
from vexport.fidelity.source import Source
from vexport.formats.dequantize import ct_scheme
from vexport.observers import MemorylessMinMaxObserver
from vexport.observers.qparams import scale_and_zero_point


def requantized(layer: Layer, source: Source, global_scale: float | None) -> Mapping[str, torch.Tensor]:
    """The weight tensors of a layer by their name within it, with `global_scale` where it is given.

    ValueError where vLLM has no scheme for the layer's config group.
    """
    weight, group = source.weight(layer.name), layer.group
    assert weight is not None
    assert group is not None
    observer = MemorylessMinMaxObserver("weight", replace(group.weights, observer_kwargs={}))
    observer.forward(weight)
    qparams = observer.get_qparams()
    shared = qparams["global_scale"] if global_scale is None else torch.tensor([global_scale])
    scale, zero_point = qparams["scale"], qparams["zero_point"]
    if shared is not None:
        scale, zero_point = scale_and_zero_point(*observer.range(), group.weights, shared)
    storage = vllm_storage(group)
    if storage.parameters(group, (weight.shape[0], weight.shape[1]))["weight_scale"].in_model_dtype:
        scale = scale.to(weight.dtype)
    # In float32: compressed-tensors would divide in the dtype of the weight.
    state = {
        "weight": weight.to(torch.float32),
        "weight_scale": scale,
        "weight_zero_point": zero_point.to(torch.int8),
    }
    if shared is not None:
        state["weight_global_scale"] = shared
    compressor = BaseCompressor.get_value_from_registry(storage.name)
    compressed: Mapping[str, torch.Tensor] = compressor.compress(state, ct_scheme(group))
    return compressed
