"""A model of transformers without its weights, and the weights of a part of it when that part runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader
from vexport.checkpoint.tensors import read_tensor
from vexport.errors import InputError, raise_all


def build_on_meta(root: Path, *, trust_remote_code: bool) -> torch.nn.Module:
    """The model in eval mode and its own dtype: parameters on the meta device, buffers real."""
    config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
    with parameters_on_meta():
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=config.dtype or torch.bfloat16, trust_remote_code=trust_remote_code
        )
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block every parameter that a module registers goes to the meta device at once.

    Buffers stay real: rotary frequencies are computed by the constructor and stored in no checkpoint.
    """
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """Name and list of the decoder layers: the list of modules that holds most parameters.

    Raises InputError for a model without a list of modules.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)
    }
    if not lists:
        raise InputError(
            type(model).__name__,
            got="no list of layers",
            need="a decoder-only model",
            fix="use a weight-only scheme",
        )
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    name = max(sizes, key=lambda key: sizes[key])
    return name, lists[name]


class Weights:
    """Fills the parameters of modules from a checkpoint.

    Tensors are found by the names that transformers gives them when it loads the checkpoint: renamed ones
    (`embed_out` is `lm_head` in its GPT-NeoX) and those of a bare base model (`h.0` in many a GPT-2).
    """

    def __init__(self, index: SourceIndex, reader: Reader, model: torch.nn.Module) -> None:
        self._root = index.root
        self._reader = reader
        self._tensors = {
            renamed: index.tensors[name] for name, renamed in parameter_names(model, index.tensors).items()
        }

    def stored_name(self, module: str) -> str:
        """The name in the checkpoint of a module with a weight; other modules keep their name."""
        tensor = self._tensors.get(f"{module}.weight")
        return tensor.name.removesuffix(".weight") if tensor else module

    def load(self, module: torch.nn.Module, prefix: str) -> None:
        """Fill all parameters of the module named `prefix`; InputErrors name what the checkpoint lacks."""
        missing = self._fill(module, prefix, lambda name: True)
        raise_all([_missing(self._root, name) for name in missing])

    def load_around(self, model: torch.nn.Module, layers_name: str) -> None:
        """Fill the parameters outside the decoder layers.

        Those that the checkpoint does not have (a tied output head) stay on the meta device.
        """
        self._fill(model, "", lambda name: not name.startswith(f"{layers_name}."))

    def _fill(self, module: torch.nn.Module, prefix: str, wanted: Callable[[str], bool]) -> list[str]:
        missing, read = [], []
        for owner_name, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                full = ".".join(part for part in (prefix, owner_name, name) if part)
                if not wanted(full):
                    continue
                tensor = self._tensors.get(full)
                if tensor is None:
                    missing.append(full)
                    continue
                value = read_tensor(self._reader, tensor).to(parameter.dtype, copy=True)
                setattr(owner, name, torch.nn.Parameter(value, requires_grad=False))
                read.append(tensor)
        self._reader.release(read)
        return missing


def parameter_names(model: torch.nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each stored tensor, by transformers' own rules for loading this model."""
    renamings = [
        rule
        for rule in get_model_conversion_mapping(model)
        if isinstance(rule, WeightRenaming)  # converters also merge tensors, which calibration does not
    ]
    prefix, parameters = getattr(model, "base_model_prefix", ""), dict(model.named_parameters())
    return {name: rename_source_key(name, renamings, [], prefix, parameters)[0] for name in stored}


def unload(module: torch.nn.Module) -> None:
    """Drop the module's weights: its parameters are on the meta device again, its buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))


def _missing(root: Path, name: str) -> InputError:
    return InputError(
        f"{root}: {name}",
        got="no tensor of that name",
        need="the weight that the model class asks for",
        fix="restore the checkpoint, or use a weight-only scheme",
    )
