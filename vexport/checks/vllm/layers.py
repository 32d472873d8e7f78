"""The linear layers of a checkpoint one by one, each with what vLLM takes it for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from vexport.checks.vllm.expected import expected_parameters
from vexport.checks.vllm.subject import QUANTIZED_LEAVES, ConfigGroup, Subject, Unit
from vexport.types import TensorInfo

# Bookkeeping of a few subjects: one before a mend, one after.
KEPT_SUBJECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One linear layer: its tensors, the layers that vLLM runs it with, its config group if it has one."""

    name: str
    unit: Unit
    leaves: Mapping[str, TensorInfo]
    group: ConfigGroup | None

    @property
    def is_quantized(self) -> bool:
        return bool(QUANTIZED_LEAVES & self.leaves.keys())


@lru_cache(maxsize=KEPT_SUBJECTS)
def layers_of(subject: Subject) -> Mapping[str, Layer]:
    """All linear layers by name."""
    return {
        name: Layer(name=name, unit=unit, leaves=leaves, group=group)
        for unit, group in ((unit, subject.group_of(unit)) for unit in subject.units)
        for name, leaves in unit.members.items()
    }


def fits(group: ConfigGroup, leaves: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer's tensors are all and only what a config group announces."""
    expected = expected_parameters(group, leaves)
    if expected is None or expected.keys() != leaves.keys() - {"bias"}:
        return False
    return all(
        leaves[leaf].dtype in parameter.dtypes and leaves[leaf].shape in (parameter.shape, ())
        for leaf, parameter in expected.items()
    )


def single_value(subject: Subject, tensor: TensorInfo | None) -> float | None:
    """The value of a parameter that has one; None for others."""
    if tensor is None or tensor.num_bytes == 0 or any(side != 1 for side in tensor.shape):
        return None
    return float(subject.reader.array(tensor).reshape(-1)[0])
