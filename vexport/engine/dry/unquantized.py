"""Writes the unquantized model of a checkpoint's class that transformers makes, without weights."""

import json
import struct
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from vexport.checkpoint.index import COMPRESSION_CONFIG, QUANTIZATION_CONFIG, SINGLE_NAME
from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.engine.messages import ControlKind
from vexport.files import read_json_object, write_text
from vexport.records import Json

# Decoder layers of the default model: enough for the kinds of layers that follow each other.
_LAYERS = 4


def write_control(kind: ControlKind, checkpoint: Path, folder: Path) -> bool:
    """Write the unquantized model of a checkpoint's class that transformers makes into `folder`.

    Returns False if transformers cannot, as for a class with code of its own. Weights are not written: the
    file has holes in their place, which take no room on the disk.
    """
    try:
        stored = read_json_object(checkpoint / "config.json")
        folder.mkdir()
        if kind == "default config":
            write_text(folder / "config.json", json.dumps(_default_config(stored)))
        else:
            write_text(folder / "config.json", json.dumps(_without_quantization(stored)))
            _write_headers(folder, _saved_tensors(folder, stored))
    except Exception as error:  # whatever transformers raises of this config
        traceback.print_exception(error)
        return False
    return True


def _default_config(stored: Mapping[str, Json]) -> dict[str, Json]:
    model_type = stored["model_type"]
    try:
        config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=_LAYERS)
    except Exception:  # a config whose lists have one entry for each layer
        config = transformers.AutoConfig.for_model(model_type)
    text = json.loads(config.to_json_string(use_diff=False))
    dtype = stored.get("dtype", stored.get("torch_dtype", "bfloat16"))
    return {**text, "architectures": stored["architectures"], "dtype": dtype}


def _without_quantization(config: Mapping[str, Json]) -> dict[str, Json]:
    """The config and the configs in it without what is quantized."""
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in (QUANTIZATION_CONFIG, COMPRESSION_CONFIG)
    }


def _saved_tensors(folder: Path, stored: Mapping[str, Json]) -> Mapping[str, torch.Tensor]:
    """The tensors that transformers saves of the model of a config, on the meta device."""
    architectures = stored["architectures"]
    assert isinstance(architectures, list)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, str(architectures[0]))._from_config(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    saved: Mapping[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _write_headers(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with these tensors, without their values."""
    entries: dict[str, Json] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = next(short for short, kind in TORCH_DTYPES.items() if kind == tensor.dtype)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / SINGLE_NAME).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
