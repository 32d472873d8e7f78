"""What a folder is that holds no checkpoint of safetensors, by the files in it, and what to do about it."""

from dataclasses import dataclass
from pathlib import Path

from vexport.errors import InputError
from vexport.files import read_json_object

GGUF_FIX = "name the model that it was converted from; its weights are quantized already"
CONVERT = (
    'convert it, where you trust its files: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{root}').save_pretrained('{root}-safetensors')\""
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Another thing than a checkpoint: files that it has (patterns), what it is, and what helps.

    `{root}` stands for the folder, `{file}` for the first of its files.
    """

    patterns: tuple[str, ...]
    got: str
    fix: str


# The first whose files are there is named.
KINDS = (
    Kind(
        ("adapter_config.json",),
        "a LoRA adapter of {base}",
        "merge it into {base} first (peft's merge_and_unload), and name the folder of the merged model",
    ),
    Kind(
        ("model_index.json",),
        "a pipeline of Diffusers",
        "name the folder of a language model; vLLM does not serve a pipeline's transformer",
    ),
    Kind(("*.gguf",), "a GGUF file ({file})", GGUF_FIX),
    Kind(
        ("snapshots/*/config.json", "models--*/snapshots/*/config.json"),
        "a folder of the hub's cache",
        "name the model by its hub id, or the folder {parent}",
    ),
    Kind(
        ("checkpoint-*/config.json",), "a folder of a training run", "name one of its checkpoints: {parent}"
    ),
    Kind(("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt"), "pickled weights alone ({file})", CONVERT),
    Kind(
        ("*.onnx", "onnx/*.onnx"), "an ONNX model ({file})", "name the checkpoint that it was exported from"
    ),
    Kind(("*.h5", "*.msgpack"), "weights of TensorFlow or Flax ({file})", CONVERT),
)


def not_a_checkpoint(root: Path) -> InputError | None:
    """The error that says what a folder is; None where nothing in it tells."""
    for kind in KINDS:
        file = next((file for pattern in kind.patterns for file in sorted(root.glob(pattern))), None)
        if file is None:
            continue
        base = ""
        if file.name == "adapter_config.json":
            base = str(read_json_object(file).get("base_model_name_or_path") or "its base model")
        names = {"root": str(root), "file": file.relative_to(root), "parent": file.parent, "base": base}
        got, fix = kind.got.format_map(names), kind.fix.format_map(names)
        return InputError(str(root), got=got, need="a checkpoint of safetensors", fix=fix)
    return None
