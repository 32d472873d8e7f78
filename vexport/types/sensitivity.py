"""What quantizing each part of a model costs, and the mixed scheme chosen from that."""

from dataclasses import dataclass
from typing import Literal

from vexport.types.findings import Finding
from vexport.types.rounding import Rounding

# What a mixed scheme must stay within: bits per weight, bytes or share of the source's bytes for the whole
# checkpoint.
BudgetKind = Literal["bits", "bytes", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeLoss:
    """What one scheme costs one group while all else stays as in the source.

    `num_bytes` is what the group's tensors take, `loss` the mean KL(source || quantized) in nats per token.
    """

    scheme: str
    observer: str
    num_bytes: int
    loss: float
    rounding: Rounding = "nearest"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivity:
    """The linear layers that vLLM needs in one scheme: a fused layer, or all routed experts of a layer.

    `name` is as in FusionGroup, for routed experts their module (`model.layers.0.mlp.experts`). `refused`
    says which schemes vLLM could not run here, and why.
    """

    name: str
    layers: tuple[str, ...]
    parameters: int
    source_bytes: int
    schemes: tuple[SchemeLoss, ...]
    refused: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The loss of every group, on `samples` calibration rows of `tokens` tokens together."""

    samples: int
    tokens: int
    groups: tuple[GroupSensitivity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The scheme chosen for a group (`keep` leaves it as it is), its bytes and its loss in nats per token."""

    name: str
    scheme: str
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedScheme:
    """What `scheme: auto` chose within its budget.

    `loss` is the sum of the choices' losses, a prediction.
    """

    budget: BudgetKind
    limit: float
    candidates: tuple[str, ...]
    output_bytes: int
    loss: float
    choices: tuple[Choice, ...]
