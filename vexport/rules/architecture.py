"""Rules of model classes and their layers."""

from vexport.rules.book import Rule

_DRY_LOAD = "load the output with `vexport load --dry` before you use it"

UNQUANTIZABLE = Rule(
    "architecture/unquantizable",
    claim="refused",
    got="scheme {scheme} for a layer that vLLM never quantizes",
    need="a layer that vLLM can load quantized",
    do="remove the rule, or give it scheme: keep",
)
UNKNOWN_EXPERTS = Rule(
    "architecture/unknown-experts",
    "warning",
    got="experts with another layout",
    need="a separate weight for each expert, under the name that vLLM loads",
    do="ignore this: these experts stay unquantized",
)
NEWER_CLASS = Rule(
    "architecture/newer-class",
    "info",
    got="a class that vLLM {vllm} added; vexport uses the rules of vLLM {vllm}",
    need="a class of vLLM {pinned}",
    do="serve the output with vLLM {vllm} or later",
)
UNKNOWN_MODULES = Rule(
    "architecture/unknown-modules",
    "warning",
    got="no table of the modules outside the language model: vexport recognizes them only by "
    "their names",
    do=_DRY_LOAD,
)
ASSUMED = Rule(
    "architecture/assumed",
    "warning",
    got="no supported text model, so the usual fused layers are assumed ({layers})",
    do="check the groups of the plan, and load the output in vLLM before you use it",
)
BACKEND = Rule(
    "architecture/backend",
    "info",
    got="a class that vLLM {vllm} runs with its Transformers backend, which fuses the layers that "
    "it recognizes in the code of transformers {transformers}",
    need="a class that vLLM implements",
    do="test other versions of transformers with `vexport load --dry`: fused layers may differ",
)
UNKNOWN_CLASS = Rule(
    "architecture/unknown-class",
    got="{reason}",
    need="a class with which vLLM {vllm} generates text",
    do="see `vexport list architectures`",
)
VOCAB_SIZE = Rule(
    "architecture/vocab-size",
    got="no vocab_size, the number of tokens",
    do="restore the model's config.json",
)
