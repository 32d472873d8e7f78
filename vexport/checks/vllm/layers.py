"""The linear layers of a checkpoint one by one, each with what vLLM takes it for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from vexport.checks.vllm.view import QUANTIZED_PARAMETERS, CheckpointView, ConfigGroup, FusedLinear
from vexport.types import TensorInfo

# Bookkeeping of a few views: one before a repair, one after.
KEPT_VIEWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One linear layer: its tensors, the layers that vLLM runs it with, its config group if it has one."""

    name: str
    fused: FusedLinear
    parameters: Mapping[str, TensorInfo]
    group: ConfigGroup | None

    @property
    def is_quantized(self) -> bool:
        return bool(QUANTIZED_PARAMETERS & self.parameters.keys())


@lru_cache(maxsize=KEPT_VIEWS)
def layers_of(view: CheckpointView) -> Mapping[str, Layer]:
    """All linear layers by name."""
    return {
        name: Layer(name=name, fused=fused, parameters=parameters, group=group)
        for fused, group in ((fused, view.group_of(fused)) for fused in view.fused_linears)
        for name, parameters in fused.members.items()
    }


def fits(group: ConfigGroup, parameters: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer's tensors are all and only what a config group announces."""
    expected = group.expected(parameters)
    if expected is None or expected.keys() != parameters.keys() - {"bias"}:
        return False
    return all(
        parameters[parameter].dtype in form.dtypes and parameters[parameter].shape in (form.shape, ())
        for parameter, form in expected.items()
    )


def single_value(view: CheckpointView, tensor: TensorInfo | None) -> float | None:
    """The value of a parameter that has one; None for others."""
    if tensor is None or tensor.num_bytes == 0 or any(side != 1 for side in tensor.shape):
        return None
    return float(view.reader.array(tensor).reshape(-1)[0])
