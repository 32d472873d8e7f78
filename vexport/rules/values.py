"""Rules of the stored numbers: scales, codes and unquantized values."""

from vexport.rules.book import Rule

_PLAUSIBLE = "scales of a plausible size"
_RECIPROCAL = (
    "export the checkpoint again: these are not the layer's scales, or are their reciprocals"
)
_TENSOR = "look at this tensor in the source, then export the checkpoint again"
_CALIBRATE = "calibrate again: the value is not this layer's scale, or is its reciprocal"

INVALID_SCALE = Rule(
    "values/invalid-scale",
    claim="values",
    got="{invalid:and} of {count:,}",
    need="finite scales above zero",
    do="look at this layer's weight and calibration, then export the checkpoint again",
)
NEGATIVE_INPUT_SCALE = Rule(
    "values/negative-input-scale",
    "warning",
    "values",
    got="a negative scale, which does no harm because its sign cancels",
    need="a scale above zero",
    do="store its absolute value",
)
EQUAL_SCALES = Rule(
    "values/equal-scales",
    claim="values",
    got="{count:,} scales that all equal {value:g}",
    need=_PLAUSIBLE,
    do=_RECIPROCAL,
)
WEIGHT_SIZE = Rule(
    "values/weight-size",
    claim="values",
    got="scales of weights around {typical:.3g}",
    need=_PLAUSIBLE,
    do=_RECIPROCAL,
)
SMALL_BLOCK_SCALES = Rule(
    "values/small-block-scales",
    claim="values",
    got="no scale above {largest:g}, but the largest scale should be about 448",
    do=_RECIPROCAL,
)
SMALLER_THAN_FUSED = Rule(
    "values/smaller-than-fused",
    claim="values",
    got="no scale above {largest:g}, but up to {fused:g} in a layer that vLLM fuses with it",
    do=_RECIPROCAL,
)
UNCALIBRATED = Rule(
    "values/uncalibrated",
    claim="values",
    got="1, the initial value of uncalibrated scales",
    need=_PLAUSIBLE,
    do="calibrate the model, and export the checkpoint again",
)
INPUT_SIZE = Rule(
    "values/input-size",
    claim="values",
    got="{value:g}, a scale for inputs up to {largest:g}",
    need=_PLAUSIBLE,
    do=_RECIPROCAL,
)
INVERTED_GLOBAL_SCALE = Rule(
    "values/inverted-global-scale",
    claim="values",
    got="{value:g}, which looks like the reciprocal of a global scale",
    need="a global scale (448*6/absmax) of at least {least:g}",
    do="store 1/value, or export the checkpoint again",
)
UNUSUAL_WEIGHTS = Rule(
    "values/unusual-weights",
    "warning",
    "values",
    got="scales of weights around {typical:.2g}, but {nearest:.2g} in the most similar of the "
    "other {others} layers",
    need="scales of a similar size in all layers {kind}",
    do="add --source MODEL to compare the weights with the original model",
)
LOST_WEIGHTS = Rule(
    "values/lost-weights",
    claim="values",
    got="only zero codes for {share:.0%} of the scales",
    need="codes other than zero wherever the scale has a usual size",
    do="download or export the checkpoint again: a part of the weight is lost",
)
NO_LARGEST_CODES = Rule(
    "values/no-largest-codes",
    claim="values",
    got="{share:.0%} of the scales without the largest code, which all other layers have for each "
    "scale",
    do="export the checkpoint again: the weight is transposed, or its codes belong to another "
    "weight",
)
CODE_RANGE = Rule(
    "values/code-range",
    claim="values",
    got="more bits in {wrong:,} of {count:# code}",
    need="codes of {bits} bits, from {least} to {most}",
    do="correct num_bits in the config group",
)
NOT_FINITE = Rule(
    "values/not-finite",
    claim="values",
    got="{count:# NaN or infinite value}",
    need="finite values",
    do=_TENSOR,
)
NOT_A_NUMBER = Rule(
    "values/not-a-number", claim="values", got="{count:# NaN value}", need="numbers", do=_TENSOR
)
ALL_ZERO = Rule(
    "values/all-zero", claim="values", got="only zeros", need="values other than zero", do=_TENSOR
)
LARGER_THAN_NORM = Rule(
    "values/larger-than-norm",
    claim="values",
    got="a scale for inputs up to {largest:.3g}",
    need="a scale for inputs up to {most:.3g}, the largest output of the preceding norm",
    do=_CALIBRATE,
)
SMALLER_THAN_NORM = Rule(
    "values/smaller-than-norm",
    claim="values",
    got="a scale for inputs up to {largest:.3g}",
    need="a scale for inputs up to {least:.3g} or more, because the preceding norm outputs a value "
    "of at least this size for each token",
    do=_CALIBRATE,
)
