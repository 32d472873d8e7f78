"""Rules of the dtypes and shapes of tensors."""

from vexport.rules.book import LoaderFault, Rule

_EXPORT = "export the checkpoint again"
_EXPORT_OR_CORRECT = "export the checkpoint again, or correct the config"
# vLLM refuses a tensor of another shape, or copies a part of it.
_FAULTS: tuple[LoaderFault, ...] = ("refused", "cast", "narrowed")

DTYPE = Rule(
    "shapes/dtype",
    claim="values",
    got="{dtype}: vLLM would cast the values and change them",
    need="dtype {dtypes:or}",
    do=_EXPORT,
)
CAST = Rule(
    "shapes/cast",
    "warning",
    "values",
    got="{dtype}, which vLLM casts, with an error of at most 0.4%",
    need="dtype {dtypes:or}",
    do=_EXPORT,
)
LOSS_IN_BFLOAT16 = Rule(
    "shapes/loss-in-bfloat16",
    claim="values",
    got="F16 with values that BF16 cannot represent: vLLM rounds them, or the dtype is wrong",
    need="dtype BF16, the model's dtype",
    do=_EXPORT,
)
ROUNDED_SCALE = Rule(
    "shapes/rounded-scale",
    "warning",
    "values",
    got="{dtype}, which is less precise; this changes the outputs no more than rounding the "
    "weights does",
    need="dtype F32, like {parameter} of {other}",
    do=_EXPORT,
)
SHAPE = Rule(
    "shapes/shape",
    claim="values",
    got="{shape}",
    need="shape {expected} ({format}, {strategy})",
    do=_EXPORT_OR_CORRECT,
    loader_faults=_FAULTS,
)
CUT = Rule(
    "shapes/cut",
    "warning",
    "values",
    got="{shape}, which vLLM silently cuts to the expected size",
    need="shape {expected} ({format}, {strategy})",
    do=_EXPORT,
)
MODEL_SHAPE = Rule(
    "shapes/model-shape",
    claim="values",
    got="{shape}",
    need="shape {expected}, from the sizes of {model} in config.json",
    do=_EXPORT_OR_CORRECT,
    loader_faults=_FAULTS,
)
CUT_MODEL_SHAPE = Rule(
    "shapes/cut-model-shape",
    claim="values",
    got="{shape}, which vLLM silently cuts to the expected size",
    need="shape {expected}, from the sizes of {model} in config.json",
    do=_EXPORT_OR_CORRECT,
    loader_faults=_FAULTS,
)
FUSED_WIDTHS = Rule(
    "shapes/fused-widths",
    claim="refused",
    got="{widths:and}",
    need="the same in_features in all layers that vLLM fuses",
    do=_EXPORT,
)
GROUP_SIZE = Rule(
    "shapes/group-size",
    claim="values",
    got="in_features {width}",
    need="in_features that are a multiple of group_size {size}",
    do="quantize the layer with another group size, or keep it unquantized",
)
BLOCKS = Rule(
    "shapes/blocks",
    claim="refused",
    got="{reason}",
    need="a layer that vLLM can run with block scales",
    do="quantize the layer per channel, or keep it unquantized",
)
LARGE_ZERO_POINT = Rule(
    "shapes/large-zero-point",
    claim="values",
    got="a zero point of {value}",
    need="zero points below {limit}",
    do="convert the checkpoint to gptq_v2 with GPTQModel",
)
ZERO_POINT_OF_OTHER_FORMAT = Rule(
    "shapes/zero-point-of-other-format",
    "warning",
    "values",
    got="{value}, which is the value of {other}; vLLM does not read zero points, but other loaders "
    "would be off by one",
    need="{needed} in all zero points (checkpoint_format {format})",
    do="set checkpoint_format to {other}",
)
UNREAD_ZERO_POINTS = Rule(
    "shapes/unread-zero-points",
    claim="values",
    got="{values}; vLLM does not read zero points, and uses {middle}",
    need="{needed} in all zero points, because sym is true",
    do="quantize again with sym=True",
)
REORDERED_COLUMNS = Rule(
    "shapes/reordered-columns",
    claim="values",
    got="reordered columns (desc_act); vLLM ignores the order and would use wrong scales",
    need="groups of {size} consecutive columns",
    do="quantize again without desc_act, or with static groups",
)
