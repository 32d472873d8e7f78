"""Rules of missing and unexpected tensors."""

from vexport.rules.book import LoaderFault, Rule

_EXPORT = "export the checkpoint again"
_REMOVE = "remove the tensor, or correct its name or the config"
# vLLM refuses unknown names, and finds parameters without a stored value.
_FAULTS: tuple[LoaderFault, ...] = ("refused", "missing")

NO_TENSORS = Rule(
    "completeness/no-tensors",
    claim="values",
    got="no tensors: vLLM would use uninitialized memory for the whole model",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
MISSING_PART = Rule(
    "completeness/missing-part",
    claim="values",
    got="none of the {count} tensors that {model} has here with the sizes in config.json: vLLM "
    "would use uninitialized memory",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
MISSING_DECODER_LAYER = Rule(
    "completeness/missing-decoder-layer",
    claim="values",
    got="no such tensors, but config.json sets {layers} decoder layers (num_hidden_layers): vLLM "
    "would use uninitialized memory",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
MISSING_TENSOR = Rule(
    "completeness/missing-tensor",
    claim="values",
    got="no such {kind}, which {model} has with the sizes in config.json: vLLM would use "
    "uninitialized memory",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
MISSING_PARAMETER = Rule(
    "completeness/missing-parameter",
    claim="values",
    got="no such tensor (format {format}): vLLM would use uninitialized memory",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
MISSING_FUSED_PART = Rule(
    "completeness/missing-fused-part",
    claim="values",
    got="no such layer: vLLM fuses it with {others:# other part} of {fused}",
    do=_EXPORT,
    loader_faults=_FAULTS,
)
EXPERT_NAMES = Rule(
    "completeness/expert-names",
    claim="values",
    got="{unexpected:# tensor} under other names, which vLLM ignores, and {missing:# missing "
    "tensor}",
    need="experts under names that vLLM loads, such as {example}",
    do="export each expert as separate tensors",
    loader_faults=_FAULTS,
)
NO_DRAFT_LAYERS = Rule(
    "completeness/no-draft-layers",
    claim="refused",
    got="no tensor of {layers:# layer} for multi-token prediction (MTP): vLLM generates text "
    "without these layers, but cannot draft with mtp",
    do="copy the layers from the source, or serve the model without MTP drafts",
)
UNREAD_TENSOR = Rule(
    "completeness/unread-tensor",
    "warning",
    got="no such tensor: vLLM does not read it, but transformers and other loaders do",
    do=_EXPORT,
)
SHARED_INPUT_SCALE = Rule(
    "completeness/shared-input-scale",
    "warning",
    got="no such tensor: vLLM uses the input scale of the other layers of {fused}",
    do=_EXPORT,
)
UNEXPECTED_TENSOR = Rule(
    "completeness/unexpected-tensor",
    claim="refused",
    got="a tensor for which vLLM has no parameter",
    need="only tensors of {model}, with the sizes in config.json",
    do=_REMOVE,
    loader_faults=_FAULTS,
)
UNEXPECTED_PARAMETER = Rule(
    "completeness/unexpected-parameter",
    claim="refused",
    got="a tensor that the layer's scheme does not have",
    need="only {names:and}",
    do="remove the tensor, or correct the config",
    loader_faults=_FAULTS,
)
IGNORED_TENSOR = Rule(
    "completeness/ignored-tensor",
    "warning",
    got="an unknown tensor that vLLM silently ignores",
    need="only tensors of {model}, with the sizes in config.json",
    do=_REMOVE,
)
IGNORED_BIAS = Rule(
    "completeness/ignored-bias",
    "warning",
    got="a bias that vLLM silently ignores",
    need="only tensors of {model}, with the sizes in config.json",
    do=f"{_REMOVE} (attention_bias)",
)
UNTIED_HEAD = Rule(
    "completeness/untied-head",
    "warning",
    "values",
    got="a different head: vLLM would use it, transformers would use the embeddings",
    need="no head, or a copy of the embeddings, because tie_word_embeddings is true",
    do="set tie_word_embeddings to false, or remove the head",
)
