"""Rules of a checkpoint's folder and files, on disk and on the hub."""

from vexport.rules.book import Rule

_PATH = "check the path"
_DOWNLOAD_FILE = "download or export the file again"
_EXPORT = "export the checkpoint again"
_GGUF = "use the model that it was converted from, because GGUF weights are already quantized"
_SAFETENSORS = "a checkpoint with safetensors weights"
_FOLDER_OR_MODEL = "a folder or a model of the hub (ORG/NAME)"

NO_FOLDER = Rule("checkpoint/no-folder", got="no such folder", do=_PATH)
NO_FOLDER_OR_MODEL = Rule(
    "checkpoint/no-folder-or-model", got="no such folder, and {reason}", do=_PATH
)
FILE = Rule(
    "checkpoint/file",
    got="a file",
    need="a checkpoint folder",
    do="use the folder that contains the file",
)
GGUF_FILE = Rule("checkpoint/gguf-file", got="a GGUF file", need="a checkpoint folder", do=_GGUF)
NO_CONFIG = Rule(
    "checkpoint/no-config",
    got="no config.json: not a Hugging Face checkpoint (config.json and safetensors)",
    do="check the path, or download the checkpoint again",
)
NO_WEIGHTS = Rule(
    "checkpoint/no-weights",
    got="no safetensors file",
    do="convert the weights to safetensors (pickled weights are never loaded)",
)
NO_WEIGHTS_ON_HUB = Rule(
    "checkpoint/no-weights-on-hub",
    got="no safetensors file",
    do="choose a repository with safetensors (pickled weights are never loaded)",
)
ADAPTER = Rule(
    "checkpoint/adapter",
    got="a LoRA adapter of {base}",
    need=_SAFETENSORS,
    do="merge it into {base} first (peft's merge_and_unload), and use the folder of the merged "
    "model",
)
DIFFUSERS_PIPELINE = Rule(
    "checkpoint/diffusers-pipeline",
    got="a Diffusers pipeline",
    need=_SAFETENSORS,
    do="use the folder of a language model; vLLM does not serve the transformer of a pipeline",
)
GGUF = Rule("checkpoint/gguf", got="a GGUF file ({file})", need=_SAFETENSORS, do=_GGUF)
HUB_CACHE = Rule(
    "checkpoint/hub-cache",
    got="a folder of the hub's cache",
    need=_SAFETENSORS,
    do="use the model's hub id, or the folder {parent}",
)
TRAINING_RUN = Rule(
    "checkpoint/training-run",
    got="a folder of a training run",
    need=_SAFETENSORS,
    do="use one of its checkpoints, such as {parent}",
)
PICKLED_WEIGHTS = Rule(
    "checkpoint/pickled-weights",
    got="only pickled weights ({file})",
    need=_SAFETENSORS,
    do='if you trust the files, convert them: python -c "from transformers import '
    "AutoModelForCausalLM as M; "
    "M.from_pretrained('{root}').save_pretrained('{root}-safetensors')\"",
)
UNREADABLE_FILE = Rule(
    "checkpoint/unreadable-file", got="{reason}", need="a readable file", do=_DOWNLOAD_FILE
)
BROKEN_WEIGHTS = Rule(
    "checkpoint/broken-weights",
    got="{reason}",
    need="a complete safetensors file",
    do=_DOWNLOAD_FILE,
)
NO_CLASS = Rule(
    "checkpoint/no-class",
    got="no `architectures`: the name of the model class is missing",
    do='add the class, such as "architectures": ["LlamaForCausalLM"]',
)
WEIGHT_MAP = Rule(
    "checkpoint/weight-map",
    got="no usable `weight_map` from tensor names to file names",
    do="recreate the index",
)
NAME_OUTSIDE = Rule(
    "checkpoint/name-outside",
    got="the file name {name!r}",
    need="a name inside the checkpoint's folder",
    do="discard this checkpoint: its index points outside the folder",
)
NAME_SPELLING = Rule(
    "checkpoint/name-spelling",
    got="the file name {name!r}",
    need="{normal!r}, the spelling that vLLM compares file names with",
    do="recreate the index",
)
MISSING_SHARD = Rule(
    "checkpoint/missing-shard",
    got="{reason}, but the index lists this shard",
    do="download the shard again",
)
TEMPLATE = Rule(
    "checkpoint/template",
    got="{reason}",
    need="a readable template",
    do="copy the source's file",
)
EXPONENTS_WITHOUT_INVERSE = Rule(
    "checkpoint/exponents-without-inverse",
    got="exponents that no other tensor of the layer undoes",
    need="the inverse exponents in another tensor",
    do=_EXPORT,
)
EXPONENTS = Rule(
    "checkpoint/exponents",
    got="text that is not base64",
    need="exponents in base64",
    do=_EXPORT,
)
LARGE_EXPONENT = Rule(
    "checkpoint/large-exponent", got="the exponent {value}", need="at most {most}", do=_EXPORT
)
OTHER_SMOOTHED_SOURCE = Rule(
    "checkpoint/other-smoothed-source",
    got="{dtype} {shape}",
    need="a tensor that fits the exponents in the checkpoint's {file}",
    do="use the source that the checkpoint was made from",
)
SERVER = Rule(
    "checkpoint/server",
    got="a URL",
    need=_FOLDER_OR_MODEL,
    do="download or mount the model to a folder first",
)
REVISION_OF_FOLDER = Rule(
    "checkpoint/revision-of-folder",
    got="the revision {revision!r} of a folder",
    need="a model of the hub (ORG/NAME)",
    do="remove the revision",
)
TWO_REVISIONS = Rule(
    "checkpoint/two-revisions",
    got="two revisions, {first!r} and {second!r}",
    need="one revision",
    do="remove one of them",
)
NOT_ON_HUB = Rule(
    "checkpoint/not-on-hub",
    got="it cannot be fetched from the hub: {reason}",
    do="check the name, and set HF_TOKEN if the repository is private",
)
HUB_UNREACHABLE = Rule(
    "checkpoint/hub-unreachable",
    got="it cannot be fetched from the hub: {reason}",
    do="check the network, HF_TOKEN and HF_HOME, or download it first with `hf download`",
)
