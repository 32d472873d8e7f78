"""Which files of a model's repository vexport and vLLM need."""

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from vexport.checkpoint.index import INDEX_NAME, SINGLE_NAME

# Config, tokenizer, chat templates, code, card and license; other formats of the weights are never fetched.
_SIDE_FILES = re.compile(
    r".*\.(json|txt|model|jinja|py|tiktoken|vocab|bpe)|README\.md|(LICENSE|NOTICE|USE_POLICY).*"
)
# Folders with the same weights in another format, and their configs.
_OTHER_FORMATS = {"original", "onnx", "openvino", "gguf", "coreml", "metal", "mlx", "tflite", "flax"}
_WEIGHTS = ".safetensors"
_OTHER_INDEX = re.compile(r".*\.(safetensors|bin|msgpack|h5)\.index\.json")


def side_files(paths: Iterable[str]) -> list[str]:
    """The files that are not weights, the index of the weights included."""
    return sorted(path for path in paths if _is_side_file(path))


def _is_side_file(path: str) -> bool:
    relative = PurePosixPath(path)
    if _OTHER_FORMATS.intersection(relative.parts[:-1]) or relative.is_absolute():
        return False
    if any(part.startswith(".") for part in relative.parts):  # hidden, or out of the folder
        return False
    if _OTHER_INDEX.fullmatch(relative.name):
        return path == INDEX_NAME
    return _SIDE_FILES.fullmatch(relative.name) is not None


def weight_names(paths: Collection[str], indexed: Collection[str]) -> list[str]:
    """The safetensors files that are read: those of the index, else the single one, else all at the top.

    `indexed` is empty where there is no index. A file that the index names and the repository lacks is in the
    answer.
    """
    if indexed:
        return sorted(indexed)
    if SINGLE_NAME in paths:
        return [SINGLE_NAME]
    return sorted(path for path in paths if path.endswith(_WEIGHTS) and "/" not in path)
