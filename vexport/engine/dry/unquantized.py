"""Write the unquantized model that transformers builds for a checkpoint, without weights."""

import json
import struct
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from vexport.checkpoint.index import (
    COMPRESSION_CONFIG,
    QUANTIZATION_CONFIG,
    SINGLE_NAME,
    read_index,
)
from vexport.checkpoint.tensors import TORCH_DTYPES
from vexport.engine.messages import ControlKind
from vexport.files import read_json_object, write_text
from vexport.records import Json

# Dtypes that store one value of a weight in each element, so that the tensor has the
# weight's shape.
_UNPACKED_DTYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8")
# Number of decoder layers of the default model. Models that alternate kinds of layers, such as full
# and sliding-window attention, have each kind at least once in this number of layers.
_LAYERS = 4


def write_control(kind: ControlKind, checkpoint: Path, folder: Path) -> bool:
    """Write the unquantized model of this kind for a checkpoint to `folder`.

    Only "same config" has a weights file, with the tensors of the model that transformers builds.
    This file is sparse: it has a header, and holes instead of values, which use no disk space.
    Return False if the model cannot be made, for example because the class has custom code.
    """
    try:
        stored = read_json_object(checkpoint / "config.json")
        folder.mkdir()
        if kind == "default config":
            write_text(folder / "config.json", json.dumps(_default_config(stored)))
            return True
        write_text(folder / "config.json", json.dumps(_without_quantization(stored)))
        if kind == "same config":
            _write_headers(folder, _saved_tensors(folder, stored))
    except Exception as error:  # transformers raises many types of errors
        traceback.print_exception(error)
        return False
    return True


def is_sound(checkpoint: Path, folder: Path) -> bool:
    """Return True if no value in a checkpoint's config.json seems to be wrong.

    `folder` has the config without its quantization. transformers must be able to read the model
    types that the config names. It must also build a model that has most of the stored tensors,
    with the stored shapes. Only vLLM can judge a class that transformers lacks, so the config of
    such a class counts as sound.
    """
    try:
        stored = read_json_object(checkpoint / "config.json")
        if _transformers_class(stored) is None:
            return True
        read = _config_class(stored).from_pretrained(folder).to_dict()
        if not _has_types(read, stored):
            return False
        expected = _saved_tensors(folder, stored)
        tensors = read_index(checkpoint).tensors
    except Exception as error:  # transformers raises many types of errors
        traceback.print_exception(error)
        return False
    unpacked = [
        name
        for name, tensor in tensors.items()
        if name.endswith((".weight", ".bias")) and tensor.dtype in _UNPACKED_DTYPES
    ]
    common = [name for name in unpacked if name in expected]
    alike = (tuple(tensors[name].shape) == tuple(expected[name].shape) for name in common)
    return len(common) * 2 > len(unpacked) and all(alike)


def _has_types(read: Mapping[str, Json], stored: Mapping[str, Json]) -> bool:
    """Return True if the config `read` by transformers has the model types of the stored config.

    Nested configs, such as `text_config`, are compared too. A config without a model type passes.
    """
    pairs = ((read.get(key), value) for key, value in stored.items() if isinstance(value, dict))
    inner = (_has_types(ours, theirs) for ours, theirs in pairs if isinstance(ours, dict))
    return stored.get("model_type") in (None, read.get("model_type")) and all(inner)


def _transformers_class(stored: Mapping[str, Json]) -> type[transformers.PreTrainedModel] | None:
    architectures = stored["architectures"]
    assert isinstance(architectures, list)
    return getattr(transformers, str(architectures[0]), None)


def _default_config(stored: Mapping[str, Json]) -> dict[str, Json]:
    config_class = _config_class(stored)
    try:
        config = config_class(num_hidden_layers=_LAYERS)
    except Exception:  # a config with lists that need one entry for each layer
        config = config_class()
    text = json.loads(config.to_json_string(use_diff=False))
    dtype = stored.get("dtype", stored.get("torch_dtype", "bfloat16"))
    return {**text, "architectures": stored["architectures"], "dtype": dtype}


def _config_class(stored: Mapping[str, Json]) -> type[transformers.PretrainedConfig]:
    """Return the class of a model's config in transformers.

    For some types vLLM registers its config classes, with other defaults. They are used only if
    transformers lacks the model.
    """
    model = _transformers_class(stored)
    found: type[transformers.PretrainedConfig] | None = (
        model.config_class if model is not None else None
    )
    return found or type(transformers.AutoConfig.for_model(stored["model_type"]))


def _without_quantization(config: Mapping[str, Json]) -> dict[str, Json]:
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in (QUANTIZATION_CONFIG, COMPRESSION_CONFIG)
    }


def _saved_tensors(folder: Path, stored: Mapping[str, Json]) -> Mapping[str, torch.Tensor]:
    model_class = _transformers_class(stored)
    assert model_class is not None, "transformers lacks this class"
    config = _config_class(stored).from_pretrained(folder)
    with torch.device("meta"):
        model = model_class._from_config(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    saved: Mapping[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _write_headers(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
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
