"""Rules of config.json, except its quantization config."""

from vexport.rules.book import Rule

_ORIGINAL = "use the model's original config.json"

OVERFLOWING_DTYPE = Rule(
    "model/overflowing-dtype",
    claim="values",
    got="{dtype}: vLLM would run the model in {dtype}, and large values would overflow",
    need="bfloat16, in which the norms are stored",
    do="set dtype to bfloat16",
)
MODEL_TYPE_NAME = Rule(
    "model/model-type-name",
    claim="refused",
    got="{value!j}",
    need="transformers' name of the architecture",
    do=_ORIGINAL,
)
ARCHITECTURES = Rule(
    "model/architectures",
    claim="refused",
    got="{value!j}",
    need="a list of names",
    do=_ORIGINAL,
)
NO_CLASS = Rule(
    "model/no-class",
    claim="refused",
    got="no such key, and an unknown model_type: vLLM cannot find the model's class",
    do=_ORIGINAL,
)
UNKNOWN_CLASS = Rule(
    "model/unknown-class",
    claim="refused",
    got="{model}: {reason}",
    need="a class of vLLM {version} or of transformers",
    do=_ORIGINAL,
)
NO_OUTPUT_LAYER = Rule(
    "model/no-output-layer",
    claim="values",
    got="{model}, but no tensor of its output layer",
    need="a class with all its tensors stored",
    do=_ORIGINAL,
)
MODEL_TYPE = Rule(
    "model/model-type",
    claim="values",
    got="{value}",
    need="the model type of {model}",
    do=_ORIGINAL,
)
EMBEDDING_CLASS = Rule(
    "model/embedding-class",
    claim="values",
    got="no such key: vLLM would use {base} for {kind}, which computes embeddings, not text",
    do=_ORIGINAL,
)
ASSUMED_CLASS = Rule(
    "model/assumed-class",
    "warning",
    "values",
    got="no such key: vLLM uses {model} for model_type {kind}",
    do='add "architectures": ["{model}"]',
)
IMPOSSIBLE_COUNT = Rule(
    "model/impossible-count",
    claim="values",
    got="{reason}",
    need="a number that fits the stored tensors",
    do=_ORIGINAL,
)
LARGE_SIZE = Rule(
    "model/large-size",
    claim="refused",
    got="{value!j}",
    need="a possible size of a tensor",
    do=_ORIGINAL,
)
SIZE = Rule(
    "model/size",
    claim="refused",
    got="{value!j}",
    need="a whole number above zero",
    do=_ORIGINAL,
)
NO_SIZE = Rule(
    "model/no-size",
    claim="values",
    got="no such key: transformers would use its default",
    do=_ORIGINAL,
)
KEY_VALUE_HEADS = Rule(
    "model/key-value-heads",
    claim="refused",
    got="{value!j}",
    need="a divisor of num_attention_heads {heads!j}",
    do=_ORIGINAL,
)
EPSILON = Rule(
    "model/epsilon",
    claim="values",
    got="{value!j}",
    need="a number from 0 to {most}",
    do=_ORIGINAL,
)
ROPE_SCALING = Rule(
    "model/rope-scaling",
    claim="values",
    got="{old!j}, but different rope_parameters {new!j}",
    need="the same values as rope_parameters, or no key",
    do=_ORIGINAL,
)
ROPE_VALUE = Rule(
    "model/rope-value",
    claim="values",
    got="{value!j}",
    need="a finite number above zero",
    do=_ORIGINAL,
)
ROTATED_SHARE = Rule(
    "model/rotated-share",
    claim="values",
    got="{value!j}",
    need="a number above zero, at most 1",
    do=_ORIGINAL,
)
POSITION_TABLE = Rule(
    "model/position-table",
    "warning",
    "values",
    got="a rotary table of {size:,.0f} GiB, which vLLM computes on each GPU at startup",
    need="a rotary table of at most {most} GiB",
    do="set max_position_embeddings and the factor in rope_parameters to the values that the model "
    "was trained with",
)
LABELS = Rule(
    "model/labels",
    claim="refused",
    got="{value!j}",
    need="at most {most:,}, because transformers creates a name for each label",
    do=_ORIGINAL,
)
