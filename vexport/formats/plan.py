"""Plan of a quantized checkpoint: the scheme and the treatment of each fused layer.

The dataclasses are here and not in `vexport.records`, because they refer to `Scheme`. In JSON
(`vexport plan --format json`, plan.json, report.json), a scheme is represented by its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from vexport.architectures.fusion import FusedLayer
from vexport.errors import InputError
from vexport.formats.schemes import Scheme, get_scheme
from vexport.records import AttentionLayer, Finding, KvCache, LinearPlan
from vexport.records.calibration import Rounding
from vexport.records.observer_names import OptionValue


def _read_scheme(value: object) -> Scheme:
    if isinstance(value, Scheme):
        return value
    if not isinstance(value, str):
        raise ValueError("Input should be the name of a scheme")
    try:
        return get_scheme(value)
    except InputError as error:
        raise ValueError(f"Input should be the name of a scheme: {error}") from error


def _scheme_name(scheme: Scheme) -> str:
    return scheme.name


SchemeByName = Annotated[
    Scheme,
    PlainValidator(_read_scheme),
    PlainSerializer(_scheme_name, return_type=str),
    WithJsonSchema({"type": "string"}),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Scheme of a layer, and how its values are chosen.

    `observer` finds the ranges of the weights. `input_observer` finds the ranges of inputs with
    static scales, if a rule names it. `strength` and `ridge` are the settings of a refit, if a rule
    sets them.
    """

    scheme: Scheme
    observer: str
    rounding: Rounding = "nearest"
    observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    input_observer: str | None = None
    input_observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    strength: float | None = None
    ridge: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGroup:
    """Linear layers that vLLM fuses into one parameter, so that they share scales per tensor.

    `name` is the fused module's name in vLLM (`model.layers.0.self_attn.qkv_proj`). A group with a
    single member has the member's name. `observer` finds the ranges of the weights.
    `input_observer` finds the ranges of inputs with static scales, if a rule names it. `strength`
    and `ridge` are the settings of a refit, if a rule sets them. `in_tower` is True for layers of a
    tower or projector, which run once per row in front of the decoder layers.
    """

    # The fields of a fused layer and of its `Treatment` are in a single flat object, because
    # plan.json has them like this, in this order.
    name: str
    scheme: SchemeByName
    observer: str
    members: tuple[LinearPlan, ...]
    rounding: Rounding = "nearest"
    observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    input_observer: str | None = None
    input_observer_kwargs: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    strength: float | None = None
    ridge: float | None = None
    in_tower: bool = False

    @classmethod
    def from_layer(
        cls,
        layer: FusedLayer,
        members: Sequence[LinearPlan],
        treatment: Treatment,
        *,
        in_tower: bool = False,
    ) -> "FusionGroup":
        """Return a fused layer with a treatment. `members` are its linear layers with sizes."""
        return cls(
            name=layer.name,
            members=tuple(members),
            scheme=treatment.scheme,
            observer=treatment.observer,
            rounding=treatment.rounding,
            observer_kwargs=treatment.observer_kwargs,
            input_observer=treatment.input_observer,
            input_observer_kwargs=treatment.input_observer_kwargs,
            strength=treatment.strength,
            ridge=treatment.ridge,
            in_tower=in_tower,
        )

    @property
    def layer(self) -> FusedLayer:
        """Fused layer without its treatment."""
        return FusedLayer(name=self.name, members=tuple(member.name for member in self.members))

    @property
    def observers(self) -> str:
        """Observers, with the keywords that a rule sets: `mse(norm=2.0), inputs minmax`."""
        weights = _observer_text(self.observer, self.observer_kwargs)
        if self.input_observer is None:
            return weights
        return (
            f"{weights}, inputs {_observer_text(self.input_observer, self.input_observer_kwargs)}"
        )


def _observer_text(name: str, keywords: Mapping[str, OptionValue]) -> str:
    given = ", ".join(f"{keyword}={value}" for keyword, value in sorted(keywords.items()))
    return f"{name}({given})" if given else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Quantization of a checkpoint as planned from headers, rules and architecture alone.

    `kept` lists the tensors that are copied unchanged, and `kept_linears` the linear layers that
    stay unquantized. `ignore` is the `ignore` list of the quantization config. `refusals` are the
    reasons why the plan cannot be carried out. `notes` are warnings about assumptions and
    unquantized layers. `attention` lists the layers that get scales for the KV cache, and is
    empty if `kv_cache` is None. `smoothing` is the strength of smoothing before quantization, or 0
    for none. `faults` are the known faults of vLLM in these layers on the GPU of the plan, if it is
    for a GPU.
    """

    schema: Literal["vexport.plan/1"] = "vexport.plan/1"
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
    faults: tuple[Finding, ...] = ()

    @property
    def used_schemes(self) -> tuple[Scheme, ...]:
        """Schemes in use, in order of first use."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups))

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of the schemes in use, in order of first use."""
        return tuple(scheme.name for scheme in self.used_schemes)

    @property
    def scheme_names(self) -> str:
        """Names of the schemes, and the storage of the KV cache if it is calibrated."""
        cache = (f"{self.kv_cache} KV cache",) if self.kv_cache else ()
        return ", ".join((*self.schemes, *cache)) or "nothing quantized"
