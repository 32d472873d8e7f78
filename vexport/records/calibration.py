"""Records of calibration: the text, its statistics, and the rounding of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

# The steps of calibration, by their names in progress reports.
PICTURES = "encode pictures (rows)"
GRADIENTS = "measure gradients (layers)"
CALIBRATE = "calibrate (layers)"
ROUND = "round weights (layers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """Smallest and largest input value of a layer over `tokens` tokens."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRanges:
    """Smallest and largest key or value state of an attention layer, for each KV head.

    The range over all heads is the smallest of `low` and the largest of `high`.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __add__(self, other: "HeadRanges") -> "HeadRanges":
        low, high = map(min, self.low, other.low), map(max, self.high, other.high)
        return HeadRanges(low=tuple(low), high=tuple(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueRanges:
    """Ranges of the keys (after rotary embedding) and values that an attention layer caches.

    `query` is the range of the queries after rotary embedding, and `kind` the class of the
    attention layer in transformers. Both are filled only if queries get a scale.
    """

    key: HeadRanges
    value: HeadRanges
    tokens: int
    query: HeadRanges | None = None
    kind: str = ""

    def __add__(self, other: "KeyValueRanges") -> "KeyValueRanges":
        both = None if self.query is None or other.query is None else self.query + other.query
        return KeyValueRanges(
            key=self.key + other.key,
            value=self.value + other.value,
            tokens=self.tokens + other.tokens,
            query=both,
            kind=self.kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """Powers of two that multiply a stored tensor, as exponents of its rows and of its columns.

    Both are int8 in base64, and empty if all exponents are 0. A tensor with one dimension has rows
    only. `readers` are the tensors that multiply this tensor's output. The exponents of their
    columns are the negative exponents of this tensor's rows.
    """

    rows: str = ""
    columns: str = ""
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Input ranges of layers, and the other statistics of calibration text.

    The text:
    - `data` is the name of the data set.
    - `rows` are the line numbers used, from 1.
    - `digest` is the SHA-256 of their token ids.
    - `tokens` is the number of tokens that count: all tokens, or only those of answers. An expert
      may receive fewer.
    - `files` maps the pictures beside the data to their SHA-256.

    The statistics:
    - `importance` maps a layer to the mean of x^2 of each input channel, as little-endian float32
      in base64. Only layers with an observer that searches by importance have an entry.
    - `kv_ranges` is keyed by the attention module's name in the checkpoint
      (`model.layers.0.self_attn`).
    - `routed` maps a module of experts (`model.layers.0.mlp.experts`) to the number of tokens that
      the router sent to each expert. Tokens that reach an expert only because of `all_experts` are
      not counted.
    - `smoothing` is keyed by the source's tensors. All other statistics except `routed` describe
      the smoothed model.
    - `token_weights` maps a module to the mean square of the gradient at its output, by octave of
      the token's position in its row. It is filled if a refit needs it.
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
    files: Mapping[str, str] = field(default_factory=dict)


NO_CALIBRATION = CalibrationRecord(rows=(), digest="", tokens=0, ranges={})
"""Record of a checkpoint that is written without calibration text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """Fewest, median and most calibration tokens that the router of one layer sent to an expert.

    `none` lists the experts to which the router sent no token. Their statistics come from other
    experts' tokens, or are missing.
    """

    name: str
    experts: int
    fewest: int
    median: float
    most: int
    none: tuple[int, ...]


def expert_coverage(calibration: CalibrationRecord) -> tuple[ExpertCoverage, ...]:
    """Return a summary for each module of experts that processed text."""
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
    """Calibration text, and how to read it.

    `name` is a file, a folder, `default`, or a data set of the hub:
    ORG/NAME[@REVISION][:SPLIT[:COLUMN]]. `column` is the column with the text or the chat turns.
    Without it, a column with a usual name is used. If `chat_template` is False, conversations are
    read as plain text, without the chat template. `seed` shuffles the rows. `pack` joins rows into
    samples of exactly `seq_len` tokens. If `pack` is None, only plain text is packed. With
    `answers_only`, statistics count only the tokens of answers.
    """

    name: str
    samples: int
    seq_len: int
    split: str | None = None
    subset: str | None = None
    column: str | None = None
    seed: int | None = None
    pack: bool | None = None
    chat_template: bool = True
    answers_only: bool = False


# Names of roundings. Each uses more information than the rounding before it.
Rounding = str
SUMMARIES: Mapping[Rounding, str] = {
    "nearest": "Round each value to the nearest number; needs no text",
    "gptq": "Round column by column; later columns correct the output errors of earlier columns",
    "refit": "Correct the weights for the inputs of the quantized model, then round them by GPTQ",
}
ROUNDINGS = tuple(SUMMARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRounding:
    """Rounding of the weights of a fusion group.

    - `fallback` is the reason why they were rounded to nearest although a rule requests more.
    - `strength` is the strength of the refit.
    - `weighs_tokens` is True if tokens were weighted by the gradient at the layer's output.
    - `damping` was added to the diagonal of the Hessian H, as a share of the diagonal's mean.
    - `nearest_error` and `error` are |X~ (Q - W)^T|^2 / |X~ W^T|^2 of rounding to nearest, and of
      the weights that were written. They are measured over the `tokens` of calibration and all
      input `columns`, on at most 64 rows of the weights.
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
    """Rounded fusion groups of a decoder layer, and the error of the layer's output.

    `state_error` is |h~ - h|^2 / |h|^2, where h is the source's output. `cached` maps an attention
    module's name in the checkpoint to the ranges of its keys and values in the rounded layer. It is
    filled if the KV cache is quantized. `ranges`, `importance` and `routed` are as in
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
    """Rounding of a checkpoint's weights with calibration text.

    `layers` are the decoder layers in order. If weights after the last decoder layer were rounded,
    the last entry contains them.
    """

    layers: tuple[LayerRounding, ...]

    @property
    def groups(self) -> tuple[GroupRounding, ...]:
        """All fusion groups of all layers."""
        return tuple(group for layer in self.layers for group in layer.groups)

    @property
    def fallbacks(self) -> tuple[GroupRounding, ...]:
        """Groups that were rounded to nearest although a rule requests more."""
        return tuple(group for group in self.groups if group.fallback)

    @property
    def cached(self) -> Mapping[str, KeyValueRanges]:
        """Ranges of keys and values in the rounded layers, by attention module."""
        return {name: ranges for layer in self.layers for name, ranges in layer.cached.items()}

    def completed(self, calibration: CalibrationRecord) -> CalibrationRecord:
        """Return the calibration record with the statistics that the rounding of layers added."""
        for layer in self.layers:
            calibration = replace(
                calibration,
                ranges={**calibration.ranges, **layer.ranges},
                importance={**calibration.importance, **layer.importance},
                kv_ranges={**calibration.kv_ranges, **layer.cached},
                routed={**calibration.routed, **layer.routed},
            )
        return calibration
