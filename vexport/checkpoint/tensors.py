"""Convert between torch tensors and the bytes of safetensors files."""

import warnings
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from vexport.checkpoint.reader import Reader
from vexport.records import TensorInfo, TensorSpec, WeightPart

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def read_tensor(reader: Reader, tensor: TensorInfo) -> torch.Tensor:
    """Return a tensor that shares the file's memory map. It must not be written to."""
    dtype = TORCH_DTYPES[tensor.dtype]
    if tensor.num_bytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(reader.raw(tensor), dtype=dtype).reshape(tensor.shape)


def read_weight(reader: Reader, tensor: TensorInfo, part: WeightPart | None) -> torch.Tensor:
    """Return a layer's weight (out, in), a view of the file: the stored tensor or `part` of it."""
    stored = read_tensor(reader, tensor)
    if part is None:
        return stored
    expert = stored.reshape(-1, *stored.shape[-2:])[part.expert]
    return (expert.T if part.transposed else expert)[part.start : part.stop]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the little-endian bytes of a tensor, row by row."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data


def as_tensor(data: npt.NDArray[np.generic], spec: TensorSpec) -> torch.Tensor:
    """Return the bytes `data` as a tensor with the dtype and shape of `spec`, without a copy."""
    return torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
