"""Weights quantized by torch on a device such as a GPU, by fusion groups: observers, then compressors."""

from collections.abc import Mapping

import torch

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_weight
from vexport.compress import COMPRESSORS
from vexport.observers import Observer
from vexport.packing.base import Bytes
from vexport.schemes import get_scheme
from vexport.searched import observe_weight
from vexport.types import Calibration, FusionGroup


def compress_group(
    group: FusionGroup, index: SourceIndex, calibration: Calibration, reader: Reader, *, device: str
) -> Mapping[str, Bytes]:
    """The tensors that replace a group's weights by name, as bytes, but for static input scales.

    Raises InputError where a weight is not finite.
    """
    stored = compressed_group(group, index, calibration, reader, device=device)
    return {name: bytes_of(value) for name, value in stored.items()}


def compressed_group(
    group: FusionGroup, index: SourceIndex, calibration: Calibration, reader: Reader, *, device: str
) -> Mapping[str, torch.Tensor]:
    """The same tensors on the device."""
    scheme = get_scheme(group.scheme)
    tensors = [index.tensors[member.weight] for member in group.members]
    weights = [
        read_weight(reader, tensor, member.part).to(device)
        for member, tensor in zip(group.members, tensors, strict=True)
    ]
    observers = [
        observe_weight(member, weight, group, calibration.importance.get(member.name))
        for member, weight in zip(group.members, weights, strict=True)
    ]
    Observer.fuse(observers)
    compress, stored = COMPRESSORS[scheme.family.format], dict[str, torch.Tensor]()
    for member, weight, observer in zip(group.members, weights, observers, strict=True):
        found = compress(weight, observer.get_qparams(), scheme.args)
        stored |= {f"{member.name}.{name}": value for name, value in found.items()}
    reader.release(tensors)
    return stored


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The little-endian bytes of a tensor, row by row."""
    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
