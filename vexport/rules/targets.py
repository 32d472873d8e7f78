"""Rules of the targets and ignored layers in a quantization config."""

from vexport.rules.book import LoaderFault, Rule

_FAULTS: tuple[LoaderFault, ...] = ("refused", "missing")
_QUANTIZED = "quantized tensors ({format}), because {group} targets this {kind}"
_ADD = "add the {kind} to {key}, or export it quantized"
_ONE_GROUP = "one config group for all projections of the experts"
_ALIKE = "quantize all projections of the experts alike, or none"

PARTLY_IGNORED = Rule(
    "targets/partly-ignored",
    claim="refused",
    got="only {ignored:and}",
    need="all or none of {parts:and} in {key}, because vLLM fuses them",
    do="list all of them in {key}, or none",
)
UNQUANTIZED_LAYER = Rule(
    "targets/unquantized-layer",
    claim="refused",
    got="an unquantized weight",
    need=_QUANTIZED,
    do=_ADD,
    loader_faults=_FAULTS,
)
CAST_LAYER = Rule(
    "targets/cast-layer",
    claim="values",
    got="an unquantized weight, which vLLM casts to the scheme's dtype",
    need=_QUANTIZED,
    do=_ADD,
    loader_faults=_FAULTS,
)
QUANTIZED_EMBEDDING = Rule(
    "targets/quantized-embedding",
    claim="refused",
    got="quantized tensors ({tensors:and}): {reason}",
    need="an unquantized embedding, or packed integers that vLLM supports for this model class",
    do="quantize again with the embedding in ignore",
)
EXPERT_GROUPS = Rule(
    "targets/expert-groups",
    claim="refused",
    got="{groups:and}",
    need=_ONE_GROUP,
    do=_ALIKE,
)
EXPERT_GROUPS_WITHOUT_GATE = Rule(
    "targets/expert-groups-without-gate",
    claim="refused",
    got="{groups:and}",
    need=_ONE_GROUP,
    do=_ALIKE + "; for experts without a gate, vLLM also looks up {absent}: add it to the targets",
)
UNTARGETED_LAYER = Rule(
    "targets/untargeted-layer",
    claim="refused",
    got="quantized tensors ({tensors:and}), but no target matches",
    need="a target for this layer",
    do="add the layer to targets, or remove it from {key}",
    loader_faults=_FAULTS,
)
EXCLUDED_LAYER = Rule(
    "targets/excluded-layer",
    claim="refused",
    got="quantized tensors ({tensors:and}), but a config that excludes the layer",
    need="a config by which vLLM quantizes this layer ({source})",
    do="correct {key}, or store the layer unquantized",
    loader_faults=_FAULTS,
)
NEVER_QUANTIZED = Rule(
    "targets/never-quantized",
    claim="refused",
    got="quantized tensors ({tensors:and})",
    need="an unquantized layer: {reason}",
    do="quantize the source again with this layer in {key}",
    loader_faults=_FAULTS,
)
# vLLM drops the scales of an output head that it runs unquantized.
QUANTIZED_HEAD = Rule(
    "targets/quantized-head",
    claim="values",
    got="a quantized output head ({tensors:and}) that vLLM runs unquantized",
    need="a config by which vLLM quantizes the head, or an unquantized head",
    do='add "re:.*lm_head" to the targets, or quantize again with the head in {key}',
    loader_faults=_FAULTS,
)
