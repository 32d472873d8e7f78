"""Linear layers of a checkpoint: by the names of their tensors, as vLLM fuses them, and one by one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vexport.architectures import Architecture
from vexport.checkpoint.dtypes import FLOATING
from vexport.checkpoint.index import SourceIndex
from vexport.checks.vllm.groups import ConfigGroup
from vexport.records import FusionGroup, LinearPlan, TensorInfo

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
        # of other methods
        "qweight",
        "qzeros",
        "weight_scale_inv",
        "weight_scale_2",
        "input_scale_2",
        "blocks",
    }
)
# What only a layer with others of those has.
WITH_OTHERS = frozenset({"scales", "g_idx"})
# Parameters of all experts of a layer that are joined to their projection's name (gpt-oss).
JOINED = re.compile(r"(?P<module>.*\.experts\.(?:gate_up|down)_proj)_(?P<parameter>blocks|scales|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """The layers that vLLM runs as one: module name -> parameter name -> tensor."""

    name: str
    members: Mapping[str, Mapping[str, TensorInfo]]

    @property
    def is_quantized(self) -> bool:
        """Return whether any member stores quantized tensors."""
        return any(quantized_parameters(parameters) for parameters in self.members.values())

    @property
    def by_name(self) -> FusionGroup:
        """The layers as a plan has them, without sizes."""
        members = (LinearPlan(name=name, weight=name, out_features=0, in_features=0) for name in self.members)
        return FusionGroup(name=self.name, scheme="", observer="", members=tuple(members))


def quantized_parameters(parameters: Mapping[str, TensorInfo]) -> list[str]:
    """The parameters of a layer that are those of a quantized one; a weight of 8 bits is one by its dtype."""
    return sorted(
        parameter
        for parameter, tensor in parameters.items()
        if parameter in QUANTIZED_PARAMETERS or (parameter == "weight" and tensor.dtype not in FLOATING)
    )


def linear_modules(index: SourceIndex, architecture: Architecture) -> dict[str, dict[str, TensorInfo]]:
    """Parameters by linear module: modules with quantized parameters or a two-dimensional weight."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for tensor in index.tensors.values():
        module, parameter = split_name(tensor.name)
        if parameter in QUANTIZED_PARAMETERS | WITH_OTHERS or parameter in ("weight", "bias"):
            modules.setdefault(module, {})[parameter] = tensor
    return {name: each for name, each in modules.items() if _is_linear(name, each, architecture)}


def split_name(name: str) -> tuple[str, str]:
    """The module and the parameter that a tensor's name is made of."""
    joined = JOINED.fullmatch(name)
    if joined is not None:
        return joined["module"], joined["parameter"]
    module, _, parameter = name.rpartition(".")
    return module, parameter


def joined_name(module: str, parameter: str) -> str:
    """The name of a module's tensor."""
    joined = f"{module}_{parameter}"
    return joined if JOINED.fullmatch(joined) else f"{module}.{parameter}"


def _is_linear(module: str, parameters: Mapping[str, TensorInfo], architecture: Architecture) -> bool:
    if QUANTIZED_PARAMETERS & parameters.keys():
        return True
    weight = parameters.get("weight")
    return weight is not None and len(weight.shape) == 2 and not architecture.is_table(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """One linear layer: its tensors, the layers that vLLM runs it with, its config group if it has one."""

    name: str
    fused: FusedLinear
    parameters: Mapping[str, TensorInfo]
    group: ConfigGroup | None

    @property
    def is_quantized(self) -> bool:
        return bool(QUANTIZED_PARAMETERS & self.parameters.keys())


def fits(group: ConfigGroup, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return whether a layer's tensors are all and only what a config group announces."""
    expected = group.expected(parameters)
    if expected is None or expected.keys() != parameters.keys() - {"bias"}:
        return False
    return all(
        parameters[parameter].dtype in form.dtypes and parameters[parameter].shape in (form.shape, ())
        for parameter, form in expected.items()
    )
