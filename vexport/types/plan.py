"""What becomes of every tensor of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vexport.types.findings import Finding
from vexport.types.observer_options import OptionValue
from vexport.types.rounding import Rounding
from vexport.types.tensors import WeightPart

# How the KV cache is stored: one fp8 scale for keys and one for values of a layer, or one for each KV head.
KvCache = Literal["fp8", "fp8_per_head"]
# What becomes of layers whose shapes vLLM could not run.
OnUnsupportedShape = Literal["refuse", "keep", "smaller-group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """One linear layer to quantize: its name in the output, the stored tensor that holds its weight.

    The weight is (out_features, in_features): the whole tensor, or `part` of it.
    """

    name: str
    weight: str
    out_features: int
    in_features: int
    part: WeightPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGroup:
    """Linear layers that vLLM runs as one parameter and that therefore share scales per tensor.

    `name` is the fused module's name in vLLM (`model.layers.0.self_attn.qkv_proj`); a group of one
    member carries that member's name. `observer` finds the ranges of the weights, `input_observer` those of
    inputs with static scales, where a rule names one.
    """

    name: str
    scheme: str
    observer: str
    members: tuple[LinearPlan, ...]
    rounding: Rounding = "nearest"
    observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    input_observer: str | None = None
    input_observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)

    @property
    def observers(self) -> str:
        """What finds the ranges, with the keywords that a rule gives: `mse(norm=2.0), inputs minmax`."""
        weights = _called(self.observer, self.observer_kwargs)
        if self.input_observer is None:
            return weights
        return f"{weights}, inputs {_called(self.input_observer, self.input_observer_kwargs)}"


def _called(name: str, keywords: Mapping[str, OptionValue]) -> str:
    given = ", ".join(f"{keyword}={value}" for keyword, value in sorted(keywords.items()))
    return f"{name}({given})" if given else name


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """An attention layer that gets scales for the KV cache: its module's name in the checkpoint.

    `heads` is how many KV heads have scales of their own, None where one serves them all.
    """

    name: str
    heads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be done to a checkpoint, from headers, rules and architecture alone.

    `ignore` says in vLLM's terms what stays unquantized; `notes` are warnings about what was assumed or kept.
    `attention` has the layers that get scales for the KV cache; none where `kv_cache` is None.
    `smoothing` is the strength with which inputs are smoothed before anything else, 0 for not at all.
    """

    source: str
    architecture: str
    groups: tuple[FusionGroup, ...]
    kept: tuple[str, ...]
    kept_linears: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    parameters: int
    ignore: tuple[str, ...] = ()
    refusals: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    kv_cache: KvCache | None = None
    attention: tuple[AttentionLayer, ...] = ()
    smoothing: float = 0.0

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes in use, in order of first use."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups))
