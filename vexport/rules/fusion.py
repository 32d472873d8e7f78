"""Rules of the scales that fused layers share."""

from vexport.rules.book import Rule

_ONE_VALUE = "one value for all layers that vLLM fuses"

WEIGHT_GLOBAL_SCALE = Rule(
    "fusion/weight-global-scale",
    claim="values",
    got="{values:and}",
    need=_ONE_VALUE,
    do="quantize again with a shared scale; vLLM would use the largest value for all",
)
INTEGER_INPUT_SCALE = Rule(
    "fusion/integer-input-scale",
    claim="values",
    got="{values:and}",
    need=_ONE_VALUE,
    do="quantize again with a shared scale; vLLM would use the last value that it reads for all",
)
INPUT_SCALE = Rule(
    "fusion/input-scale",
    claim="values",
    got="{values:and}",
    need=_ONE_VALUE,
    do="quantize again with a shared scale; vLLM would use {used:.9g} for all",
)
WEIGHT_SCALE = Rule(
    "fusion/weight-scale",
    "warning",
    "values",
    got="{values:and}",
    need=_ONE_VALUE,
    do="quantize again with a shared scale; vLLM requantizes to the largest value, with a small "
    "loss",
)
NO_SOURCE_OF_LAYERS = Rule(
    "fusion/no-source-of-layers",
    claim="values",
    got="{values:and}, and a source without these layers",
    need=_ONE_VALUE,
    do="pass the unquantized model that the checkpoint was made from with --source",
)
AMBIGUOUS_SCALES = Rule(
    "fusion/ambiguous-scales",
    claim="values",
    got="{values:and}: each layer has a separate scale, or one of the scales is wrong",
    need=_ONE_VALUE,
    do="pass the unquantized model with --source to find the right scale",
)
NO_MATCHING_SCALE = Rule(
    "fusion/no-matching-scale",
    claim="values",
    got="{values:and}: with none of these scales, {layer} has the source's weight",
    need=_ONE_VALUE,
    do="export the checkpoint again, or pass the right source with --source",
)
