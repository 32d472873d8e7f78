"""Rules of the online rotations in a quantization config."""

from vexport.rules.book import Rule

_MERGE = "use only rotations that are merged into the weights (R1, R2)"

LOCATION = Rule(
    "transforms/location",
    claim="values",
    got="a transform at {location}",
    need="transforms of the inputs or outputs of linear layers (vLLM has no others)",
    do=_MERGE,
)
SEVERAL_RANKS = Rule(
    "transforms/several-ranks",
    claim="refused",
    got="{names:and}",
    need="no online transforms, because vLLM only computes them on a single rank",
    do="serve it on one GPU, or merge the rotations into the weights",
)
NO_MATRIX = Rule(
    "transforms/no-matrix",
    claim="values",
    got="no such tensor: the matrix of the {kind} transform must be stored with one of its layers",
    do=_MERGE,
)
EXPERTS = Rule(
    "transforms/experts",
    claim="values",
    got="the transform {name}",
    need="no online transform of routed experts, because vLLM does not compute it",
    do=_MERGE,
)
PART_OF_FUSED_LAYER = Rule(
    "transforms/part-of-fused-layer",
    claim="refused",
    got="{name} only for {layers:and}",
    need="the same input transform for all layers that vLLM fuses",
    do=_MERGE,
)
BIAS = Rule(
    "transforms/bias",
    claim="refused",
    got="a bias, and the transform {name}",
    need="no bias in layers with an online transform (vLLM asserts this)",
    do=_MERGE,
)
