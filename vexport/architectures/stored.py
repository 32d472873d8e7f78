"""Group the tensors of a checkpoint by module and parameter, and find its linear layers."""

import re
from collections.abc import Mapping
from typing import Protocol

from vexport.architectures import Architecture
from vexport.records import FLOATING, Json, TensorInfo


class Headers(Protocol):
    """Config and tensors of a checkpoint, and the model class that the config names."""

    @property
    def config(self) -> Mapping[str, Json]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def architecture(self) -> str: ...


# Parameters of a linear layer that compressed-tensors stores next to or instead of its weight.
QUANTIZED_PARAMETERS = frozenset(
    {
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        # Parameters of other methods.
        "qweight",
        "qzeros",
        "weight_scale_inv",
        "weight_scale_2",
        "input_scale_2",
        "blocks",
    }
)
# Other parameters of quantized layers. A module with only these parameters is no linear layer.
AUXILIARY_PARAMETERS = frozenset({"scales", "g_idx"})
# Names of gpt-oss's stacked experts. The parameter follows the projection after an underscore
# instead of a dot: `experts.down_proj_blocks`.
JOINED = re.compile(
    r"(?P<module>.*\.experts\.(?:gate_up|down)_proj)_(?P<parameter>blocks|scales|bias)"
)


def quantized_parameters(parameters: Mapping[str, TensorInfo]) -> list[str]:
    """Return the parameters that show that a layer is quantized.

    Only quantized layers have these parameters, or a weight with a quantized dtype.
    """
    return sorted(
        parameter
        for parameter, tensor in parameters.items()
        if parameter in QUANTIZED_PARAMETERS
        or (parameter == "weight" and tensor.dtype not in FLOATING)
    )


def linear_modules(index: Headers, architecture: Architecture) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each linear layer by parameter.

    A linear layer is a module with quantized parameters, or with a two-dimensional weight that is
    not an embedding.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for tensor in index.tensors.values():
        module, parameter = split_name(tensor.name)
        if parameter in QUANTIZED_PARAMETERS | AUXILIARY_PARAMETERS or parameter in (
            "weight",
            "bias",
        ):
            modules.setdefault(module, {})[parameter] = tensor
    return {name: each for name, each in modules.items() if _is_linear(name, each, architecture)}


def split_name(name: str) -> tuple[str, str]:
    """Return the module and the parameter in a tensor's name."""
    joined = JOINED.fullmatch(name)
    if joined is not None:
        return joined["module"], joined["parameter"]
    module, _, parameter = name.rpartition(".")
    return module, parameter


def joined_name(module: str, parameter: str) -> str:
    """Return the name of a module's tensor, with an underscore for gpt-oss's experts (JOINED)."""
    if not module:
        return parameter
    joined = f"{module}_{parameter}"
    return joined if JOINED.fullmatch(joined) else f"{module}.{parameter}"


def _is_linear(
    module: str, parameters: Mapping[str, TensorInfo], architecture: Architecture
) -> bool:
    if QUANTIZED_PARAMETERS & parameters.keys():
        return True
    weight = parameters.get("weight")
    return weight is not None and len(weight.shape) == 2 and not architecture.is_embedding(module)
