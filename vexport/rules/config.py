"""Rules of the quantization config, of compressed-tensors and of all other methods."""

from vexport.rules.book import Rule

_EXPORT = "export the checkpoint again"
_KEY = "correct the key, or export the checkpoint again"
_ARGUMENTS = "correct the arguments or the format, or quantize again"
_TEST = "test the checkpoint with `vexport load`"

NO_QUANTIZATION_CONFIG = Rule(
    "config/no-quantization-config",
    claim="refused",
    got="no such key, although the checkpoint has quantized tensors",
    do=_EXPORT,
)
UNQUANTIZED = Rule(
    "config/unquantized",
    "warning",
    "precision",
    got="no layer with quantized tensors and no quantized KV cache",
    do="check the quantized checkpoint instead, if this is the unquantized model",
)
QUANT_METHOD = Rule(
    "config/quant-method",
    claim="refused",
    got="{value!j}",
    need="{method}, because the other keys belong to this method",
    do="set quant_method to {method}",
)
UNKNOWN_METHOD = Rule(
    "config/unknown-method",
    claim="refused",
    got="{value!j}, which vLLM {version} does not support",
    need="{methods:or}",
    do="quantize the source with a supported method",
)
CONFIG_GROUPS = Rule(
    "config/config-groups",
    claim="refused",
    got="{value!j}",
    need="at least one group",
    do=_EXPORT,
)
INVALID_GROUP = Rule(
    "config/invalid-group",
    claim="refused",
    got="{reason}",
    need="arguments that compressed-tensors accepts",
    do="correct the config group",
)
UNSUPPORTED_ARGUMENTS = Rule(
    "config/unsupported-arguments",
    claim="refused",
    got="{reason}",
    need="arguments and a format that vLLM supports",
    do=_ARGUMENTS,
)
UNKNOWN_FORMAT = Rule(
    "config/unknown-format",
    claim="refused",
    got="format {format}, which vLLM {version} does not support: {reason}",
    need="arguments and a format that vLLM supports",
    do=_ARGUMENTS,
)
EXPERT_ARGUMENTS = Rule(
    "config/expert-arguments",
    claim="refused",
    got="a combination that vLLM does not run for routed experts: {arguments}, format {format}",
    need="arguments and a format that vLLM supports",
    do=_ARGUMENTS,
)
ACTIVATION_ORDER = Rule(
    "config/activation-order",
    claim="refused",
    got="actorder {order}",
    need="no activation ordering, or actorder weight",
    do="quantize again with one of these orderings",
)
IGNORED_INPUTS = Rule(
    "config/ignored-inputs",
    "warning",
    "precision",
    got="inputs that vLLM leaves in 16 bits: {inputs}",
    need="input_activations that vLLM quantizes",
    do="remove input_activations and the input scales, or quantize again (same accuracy)",
)
SPARSITY = Rule(
    "config/sparsity",
    claim="refused",
    got="{value!j}",
    need="no sparsity_config, because vLLM no longer loads sparse weights",
    do="export the checkpoint without sparsity compression",
)
STRING_OF_NAMES = Rule(
    "config/string-of-names",
    "warning",
    got="the string {value!j}: vLLM takes each letter as a name",
    need="a list of names",
    do="put the string into a list",
)
LIST_OF_NAMES = Rule(
    "config/list-of-names",
    claim="refused",
    got="{value!j}",
    need="a list of names",
    do="write a list of names, or [] for none",
)
PATTERN = Rule(
    "config/pattern",
    claim="refused",
    got="{pattern}: {reason}",
    need="valid regular expressions",
    do="correct the pattern",
)
WRONG_WORD = Rule(
    "config/wrong-word",
    claim="values",
    got="{old!j}, but {place} has {found}",
    need="{new!j}, the only value that fits the tensors of all {layers:# layer} of {group}",
    do="set {key} to {new!j}, or let `vexport repair` do so",
)
REQUIRED_KEY = Rule(
    "config/required-key",
    claim="refused",
    got="no such key, or null, but vLLM requires a value ({source})",
    do=_KEY,
)
REQUIRED_OBJECT = Rule(
    "config/required-object",
    claim="refused",
    got="{value!j}",
    need="an object, because vLLM requires this key ({source})",
    do=_KEY,
)
CHOICE = Rule(
    "config/choice",
    claim="refused",
    got="{value!j}",
    need="{choices:or} (vLLM supports no others)",
    do=_KEY,
)
INTEGER = Rule("config/integer", claim="refused", got="{value!j}", need="an integer", do=_KEY)
BITS = Rule(
    "config/bits", claim="refused", got="{value!j}", need="a number from 1 to {most}", do=_KEY
)
BLOCK_SIZE = Rule(
    "config/block-size",
    claim="refused",
    got="{value!j}",
    need="two positive integers, for rows and columns, or no key",
    do=_KEY,
)
STATIC_WITH_BLOCKS = Rule(
    "config/static-with-blocks",
    claim="refused",
    got="static",
    need="dynamic, because the weights have block scales",
    do=_KEY,
)
STORE_DTYPE = Rule(
    "config/store-dtype",
    claim="refused",
    got="{value!j}",
    need="no key: with it, vLLM reads experts as MXFP4, which vexport does not check",
    do=_TEST,
)
REORDERED_COLUMNS = Rule(
    "config/reordered-columns",
    claim="refused",
    got="true",
    need="false, because vLLM does not support reordered columns (gptq_utils.py)",
    do="quantize again without desc_act, or with static groups",
)
NO_ZERO_POINTS = Rule(
    "config/no-zero-points",
    "warning",
    "precision",
    got="false",
    need="true, because vLLM's fast kernels and its CPU kernels need zero points",
    do="quantize again with zero points",
)
AWQ_LAYOUT = Rule(
    "config/awq-layout",
    claim="values",
    got="{layout}",
    need="{known}, the only layout that vLLM reads (AutoAWQ's WQLinear_GEMM)",
    do="export the checkpoint again as {known}",
)
FP8_BLOCKS = Rule(
    "config/fp8-blocks",
    claim="refused",
    got="{settings}",
    need="8 bits in blocks of rows and columns, symmetric",
    do=_KEY,
)
MX_GROUPS = Rule(
    "config/mx-groups",
    claim="refused",
    got="{settings}",
    need="4 or 8 bits in groups of {size}, symmetric",
    do=_KEY,
)
NVFP4_KEYS = Rule(
    "config/nvfp4-keys",
    claim="refused",
    got="no {missing:and}: NVFP4 needs the keys {keys:and}",
    do=_KEY,
)
NVFP4_GROUP_SIZE = Rule(
    "config/nvfp4-group-size",
    claim="refused",
    got="{value!j}",
    need="{size}, the group size of vLLM's kernels",
    do=_KEY,
)
MIXED_LAYERS = Rule(
    "config/mixed-layers",
    claim="refused",
    got="{value!j}",
    need="the algorithm of each layer, because quant_algo is {algo}",
    do=_KEY,
)
LAYER_ALGORITHM = Rule(
    "config/layer-algorithm",
    claim="refused",
    got="{algo}",
    need="{choices:or}",
    do=_TEST,
)
MXFP4_MODEL = Rule(
    "config/mxfp4-model",
    claim="refused",
    got="model_type {value!j}",
    need="a model of type {known}, the only MXFP4 model that vexport checks",
    do=_TEST,
)
MODEL_SIZE = Rule(
    "config/model-size",
    claim="refused",
    got="{value!j}",
    need="a positive integer as {key} in config.json, from which vLLM computes shapes",
    do=_KEY,
)
QUARK_CACHE = Rule(
    "config/quark-cache",
    claim="refused",
    got="{patterns!j} in layer_quant_config without output_tensors in fp8_e4m3, per tensor",
    do=_KEY,
)
QUARK_WEIGHTS = Rule(
    "config/quark-weights",
    claim="refused",
    got="{value!j}",
    need="settings of quantized weights",
    do=_KEY,
)
QUARK_OUTPUTS = Rule(
    "config/quark-outputs",
    claim="refused",
    got="quantized outputs or biases",
    need="no quantized outputs or biases, because vLLM refuses them",
    do=_KEY,
)
QUARK_SETTINGS = Rule(
    "config/quark-settings",
    claim="refused",
    got="dtypes {dtypes!j}, qscheme {qscheme!j}",
    need="settings of FP8, INT8, INT4 in groups, MXFP4 or NVFP4 that vLLM supports",
    do=_TEST,
)
UNREPAIRABLE_METHOD = Rule(
    "config/unrepairable-method",
    got="the method {method}",
    need="{known}, the only method that can be repaired",
    do="quantize the source again",
)
