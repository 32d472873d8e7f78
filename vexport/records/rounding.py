"""Records of how weights were rounded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vexport.records.calibration import CalibrationRecord, InputRange, KeyValueRanges

# The name of a way of rounding, of which the later ones know more.
Rounding = str
SUMMARIES: Mapping[Rounding, str] = {
    "nearest": "Each value becomes the nearest number; needs no text",
    "gptq": "Column after column, each corrects the errors before it in the layer's output",
    "refit": "GPTQ of weights that are corrected for the inputs of the quantized model first",
}
ROUNDINGS = tuple(SUMMARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRounding:
    """The rounding of the weights of a fusion group.

    `fallback` says why they were rounded to nearest, although a rule asks for more. `strength` is how much
    of the refit was taken, `weighs_tokens` whether tokens counted by the gradient behind them, `damping` what
    was added to H, as a share of its diagonal's mean. `nearest_error` and `error` are
    |X~ (Q - W)^T|^2 / |X~ W^T|^2 of rounding to nearest and of these weights, over the `tokens` of
    calibration that entered the `columns` of the weights, measured on 64 rows of many.
    """

    name: str
    rounding: Rounding = "nearest"
    fallback: str | None = None
    strength: float = 0.0
    weighs_tokens: bool = False
    damping: float = 0.0
    columns: int = 0
    tokens: int = 0
    nearest_error: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRounding:
    """The groups of a decoder layer, and how far its output is from the source's: |h~ - h|^2 / |h|^2.

    `cached` is what the rounded layer would write to the KV cache, where that is quantized, by the attention
    module's name in the checkpoint. `ranges`, `importance` and `routed` are those of a CalibrationRecord.
    """

    groups: tuple[GroupRounding, ...]
    state_error: float
    cached: Mapping[str, KeyValueRanges] = field(default_factory=dict)
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    importance: Mapping[str, str] = field(default_factory=dict)
    routed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingReport:
    """The rounding of a checkpoint's weights by calibration text.

    `layers` are the decoder layers in order, and last what is behind them, if any of that was rounded.
    """

    layers: tuple[LayerRounding, ...]

    @property
    def groups(self) -> tuple[GroupRounding, ...]:
        """The fusion groups of all layers."""
        return tuple(group for layer in self.layers for group in layer.groups)

    @property
    def fallbacks(self) -> tuple[GroupRounding, ...]:
        """The groups that were rounded to nearest, although a rule asks for more."""
        return tuple(group for group in self.groups if group.fallback)

    @property
    def cached(self) -> Mapping[str, KeyValueRanges]:
        """The ranges that the rounded layers write to the KV cache, by attention module."""
        return {name: ranges for layer in self.layers for name, ranges in layer.cached.items()}

    def completed(self, calibration: CalibrationRecord) -> CalibrationRecord:
        """A calibration with what the text showed of layers while they were rounded."""
        for layer in self.layers:
            calibration = replace(
                calibration,
                ranges={**calibration.ranges, **layer.ranges},
                importance={**calibration.importance, **layer.importance},
                kv_ranges={**calibration.kv_ranges, **layer.cached},
                routed={**calibration.routed, **layer.routed},
            )
        return calibration
