"""Records of calibration: the text, its statistics, and how weights were rounded by it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

# The steps of calibration, by their names in progress reports.
LOOK_BACK, CALIBRATE, ROUND = "look back (layers)", "calibrate (layers)", "round weights (layers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """Smallest and largest input value of a layer over `tokens` tokens."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRanges:
    """Smallest and largest value of each KV head of an attention layer's key or value states.

    What is shared by all heads is the smallest of `low` and the largest of `high`.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __add__(self, other: "HeadRanges") -> "HeadRanges":
        low, high = map(min, self.low, other.low), map(max, self.high, other.high)
        return HeadRanges(low=tuple(low), high=tuple(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueRanges:
    """Ranges of what an attention layer writes to the KV cache: keys after rotary embedding, and
    values.
    """

    key: HeadRanges
    value: HeadRanges
    tokens: int

    def __add__(self, other: "KeyValueRanges") -> "KeyValueRanges":
        key, value = self.key + other.key, self.value + other.value
        return KeyValueRanges(key=key, value=value, tokens=self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """The powers of two by which a stored tensor is multiplied: exponents of its rows and of its
    columns.

    Both are int8 in base64, empty where all are 0; a tensor of one dimension has rows. `readers`
    are the tensors whose columns undo what is done to the rows.
    """

    rows: str = ""
    columns: str = ""
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Input ranges by layer, and what a search by importance needs.

    `data` names the set of text, `rows` are the line numbers used (from 1), `digest` is the SHA-256
    of their token ids, `tokens` their number: a layer that saw fewer (an expert) was not reached by
    all. `importance` is the mean of x^2 per input channel by layer, float32 little-endian in
    base64, for the layers whose weights are searched by it. `kv_ranges` goes by the attention
    module's name in the checkpoint (`model.layers.0.self_attn`). `routed` has, by the name of a
    module of experts (`model.layers.0.mlp.experts`), how many tokens the router sent to each
    expert, whatever the experts' statistics saw. `smoothing` goes by the source's tensors: what
    else is here, but for `routed`, is of the smoothed model. `token_weights` is the mean square of
    the gradient behind each of the model's modules, by octaves of a token's place in its row, where
    a refit asks for it.
    """

    rows: tuple[int, ...]
    digest: str
    tokens: int
    ranges: Mapping[str, InputRange]
    importance: Mapping[str, str] = field(default_factory=dict)
    kv_ranges: Mapping[str, KeyValueRanges] = field(default_factory=dict)
    routed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: str = ""
    smoothing: Mapping[str, Smoothing] = field(default_factory=dict)
    token_weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """Calibration tokens that the router of one layer sent to each expert: fewest, median and most.

    `none` are the experts that it sent none: of their inputs calibration knows only what they would
    do with other experts' tokens, or nothing.
    """

    name: str
    experts: int
    fewest: int
    median: float
    most: int
    none: tuple[int, ...]


def expert_coverage(calibration: CalibrationRecord) -> tuple[ExpertCoverage, ...]:
    """One summary for each module of experts that text went through."""
    return tuple(
        ExpertCoverage(
            name=name,
            experts=len(counts),
            fewest=min(counts),
            median=median(counts),
            most=max(counts),
            none=tuple(expert for expert, tokens in enumerate(counts) if not tokens),
        )
        for name, counts in calibration.routed.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """A set of calibration text and how it is read.

    `name` is a file, a folder, ORG/NAME[@REVISION][:SPLIT[:COLUMN]] of the hub or `default`.
    `column` holds the text or the turns; without it the usual names are tried. With `seed` rows are
    shuffled. `pack` joins rows into samples of exactly `seq_len` tokens; None packs plain text
    alone.
    """

    name: str
    samples: int
    seq_len: int
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    seed: int | None = None
    pack: bool | None = None


# Names of roundings, each using more information than the one before.
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

    `fallback` says why they were rounded to nearest, although a rule asks for more. `strength` is
    how much
    of the refit was taken, `weighs_tokens` whether tokens counted by the gradient behind them,
    `damping` what
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
    """The groups of a decoder layer, and how far its output is from the source's: |h~ - h|^2 /
    |h|^2.

    `cached` is what the rounded layer would write to the KV cache, where that is quantized, by the
    attention module's name in the checkpoint. `ranges`, `importance` and `routed` are those of a
    CalibrationRecord.
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

    `layers` are the decoder layers in order, and last what is behind them, if any of that was
    rounded.
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
