"""Statistics of layers' inputs that static scales and searches by importance need.

Any minimum and maximum over groups of channels follows from those of each channel, so that an observer of
ranges sees these two rows in place of the activation. torch reduces 16-bit floats over tokens several times
more slowly than the integers that they are stored as, and over groups of 16 channels fifty times.
"""

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vexport.architectures.fusion import moe_layer
from vexport.calibration.inputs import Entered, GroupInputs, Value
from vexport.errors import CheckpointFailed
from vexport.formats.schemes import get_scheme
from vexport.numerics.ranks import add_up, all_reduce, gather
from vexport.observers import (
    Importance,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
    load_observer,
)
from vexport.types import FusionGroup, InputRange, Plan, observer_names

DEFAULT_INPUT_OBSERVER = "static_minmax"
# Observers whose statistics follow from the extremes of an observation, and strategies that group channels.
OF_RANGES = (MemorylessMinMaxObserver, MinMaxObserver, StaticMinMaxObserver)
OF_CHANNELS = ("tensor", "group", "tensor_group")
SIGN = -(2**15)
# Sign and magnitude in 16 bits; infinite and NaN have the largest magnitudes.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def channel_extremes(value: torch.Tensor) -> torch.Tensor:
    """Minima and maxima over all tokens of an activation (..., channels): (2, channels), same dtype.

    A channel with a NaN has a NaN among them. The activation must not be empty.
    """
    flat = value.detach().reshape(-1, value.shape[-1])
    if flat.dtype not in SIXTEEN_BIT:
        return torch.stack((flat.amin(0), flat.amax(0)))
    bits = flat.contiguous().view(torch.int16)
    # As integers positive floats are in order and above all negative ones, which are in reverse order.
    highest, lowest = bits.amax(0), bits.amin(0)
    most_negative = (bits ^ SIGN).amax(0)
    low = torch.where(most_negative >= 0, most_negative ^ SIGN, lowest)
    high = torch.where(highest >= 0, highest, lowest)
    return torch.stack((low, high)).view(flat.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What was seen so far.

    `inputs` and `importance` go by the name of the linear layer whose input they see; `routed` counts tokens
    by module of experts and expert. With `all_experts` the experts' statistics see all tokens.
    """

    inputs: Mapping[str, Observer]
    importance: Mapping[str, Importance]
    all_experts: bool = True
    routed: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def needed_by(cls, plan: Plan, *, all_experts: bool) -> "Statistics":
        """What a plan needs: static input scales, weight searches by importance."""
        return cls(
            inputs=input_observers(plan),
            importance={
                member.name: Importance.zeros(member.in_features)
                for group in plan.groups
                if group.observer in observer_names.BY_IMPORTANCE and group.rounding == "nearest"
                for member in group.members
            },
            all_experts=all_experts,
        )

    def wants(self, group: FusionGroup) -> bool:
        """Whether something of a group's input is needed."""
        return any(one.name in self.inputs or one.name in self.importance for one in group.members)

    def only(self, groups: Sequence[FusionGroup]) -> "Statistics":
        """The statistics of these groups' inputs, and none of routing."""
        names: Collection[str] = {member.name for group in groups for member in group.members}
        return Statistics(
            inputs={name: one for name, one in self.inputs.items() if name in names},
            importance={name: one for name, one in self.importance.items() if name in names},
            all_experts=self.all_experts,
        )

    def take(self, inputs: GroupInputs, module: str, value: Value) -> list[str]:
        """Take in what enters a module in one forward; the answer names layers whose input is not finite."""
        sites = [site for site in inputs.sites if site.module == module]
        if isinstance(value, Entered) and (name := moe_layer(sites[0].groups[0].members[0].name)):
            counts = torch.tensor([len(route) for route in value.routes])
            self.routed[name] = self.routed[name] + counts if name in self.routed else counts
        not_finite, last = list[str](), None
        for site in sites if self.inputs or self.importance else ():
            for layer, seen in inputs.values(site, value, all_experts=self.all_experts):
                if not seen.numel():
                    continue
                if seen is not last:  # q, k and v share theirs
                    last, rows = seen, channel_extremes(seen)
                    if not bool(torch.isfinite(rows).all()):
                        not_finite.append(layer)
                if layer in self.inputs:
                    show(self.inputs[layer], seen, rows)
                if layer in self.importance:
                    self.importance[layer].add(seen)
        return not_finite

    def sync(self) -> None:
        """Give every rank, also one that saw nothing, the statistics of all."""
        for observer in self.inputs.values():
            observer.sync_activation_stats()
        for gathered in self.importance.values():
            all_reduce(gathered.total)
            gathered.tokens = sum(gather(gathered.tokens))
        add_up(self.routed)

    def ranges(self) -> dict[str, InputRange]:
        """What the observers of inputs saw, by layer; CheckpointFailed where one saw nothing."""
        return {name: _input_range(name, observer) for name, observer in self.inputs.items()}

    def importances(self) -> dict[str, str]:
        """The importance of the channels of inputs, by layer; CheckpointFailed where nothing was seen."""
        return {name: _importance(name, gathered) for name, gathered in self.importance.items()}

    def routing(self) -> dict[str, tuple[int, ...]]:
        """How many tokens each expert got, by module of experts."""
        return {name: tuple(counts.tolist()) for name, counts in self.routed.items()}


def input_observers(plan: Plan) -> dict[str, Observer]:
    """An observer for the input of every layer whose scheme has a static input scale, by layer name."""
    observers = {}
    for group in plan.groups:
        inputs = get_scheme(group.scheme).args.input_activations
        if inputs is not None and inputs.dynamic is not True:
            for member in group.members:
                name = group.input_observer or inputs.observer or DEFAULT_INPUT_OBSERVER
                observers[member.name] = load_observer(name, "input", inputs, group.input_observer_kwargs)
    return observers


def show(observer: Observer, value: torch.Tensor, rows: torch.Tensor) -> None:
    """Let an observer see an activation; one of ranges sees its extremes, which give the same range."""
    if type(observer) in OF_RANGES and observer.strategy in OF_CHANNELS:
        observer(rows)
        observer.tokens += value.numel() // value.shape[-1] - len(rows)
    else:
        observer(value)


def _input_range(name: str, observer: Observer) -> InputRange:
    _require_tokens(name, observer.tokens, "its static input scale")
    low, high = observer.range()
    return InputRange(low=float(low.min()), high=float(high.max()), tokens=observer.tokens)


def _importance(name: str, gathered: Importance) -> str:
    _require_tokens(name, gathered.tokens, "the importance of its input channels")
    return encode_channels(gathered.mean())


def encode_channels(values: torch.Tensor) -> str:
    """A vector as JSON text: base64 of its little-endian float32 bytes."""
    return base64.b64encode(values.cpu().numpy().astype("<f4").tobytes()).decode("ascii")


def _require_tokens(name: str, tokens: int, purpose: str) -> None:
    if not tokens:
        raise CheckpointFailed(
            name,
            got="0 tokens in calibration",
            need=f"at least one for {purpose}",
            fix="add samples that reach this layer (an expert: calibrate all), or choose a dynamic scheme",
        )
