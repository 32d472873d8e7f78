"""Read the contents of a checkpoint from its headers: tensors, config, quantization, side files."""

import fnmatch
import glob
import json
import math
import posixpath
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vexport.checkpoint.dtypes import BITS
from vexport.errors import InputError, raise_all, require_working_disk
from vexport.files import digest_bytes, read_json_object, require_fetched, unreadable_kind
from vexport.records import Json, TensorInfo
from vexport.records.values import json_type
from vexport.rules import checkpoint as rules
from vexport.rules import shards
from vexport.rules.book import Rule
from vexport.rules.file import CHANGED
from vexport.words import clip

# Longest header that safetensors accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
# Keys of a tensor. Other keys are allowed and ignored.
FIELDS = ("dtype", "shape", "data_offsets")
# Limit of Rust, the language of safetensors.
LARGEST_SIZE = 2**64 - 1
# Escape of a surrogate, half of a character beyond 16 bits.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Endings of files that are part of a checkpoint. Pictures, for example, are not.
CONTENT_SUFFIXES = frozenset(
    {".safetensors", ".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}
)
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHTS_SUFFIX = ".safetensors"
QUANTIZATION_CONFIG = "quantization_config"
# Older name of the key, from compressed-tensors.
COMPRESSION_CONFIG = "compression_config"
# ModelOpt 0.29 and earlier wrote the quantization config only to this file. Newer versions also
# write this file.
SEPARATE_FILE = "hf_quant_config.json"
TEXT = "text_config"
# Files that contain a tokenizer's vocabulary, or code that loads a vocabulary.
TOKENIZER_FILES = re.compile(r"tokenizer\.json|tekken\.json|vocab.*|.*\.(model|tiktoken|py)$")
# Names of files that vLLM and transformers open if they exist.
LOADED_FILES = re.compile(
    r".*\.(safetensors\.index\.json|model|tiktoken|jinja)"
    r"|(config|generation_config|hf_quant_config|quantize_config|quant_config|params|vocab|added_tokens)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|chat_template|tekken|processor_config)\.json"
    r"|(preprocessor_config|video_preprocessor_config|modules)\.json|(vocab|merges)\.txt"
)
# Other formats of the same weights, which are not copied to the output.
FOREIGN_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx)(\.index\.json)?$"
)
# Folders that are not checkpoints: patterns of files in them, and the rule that names the kind of
# folder. The first match wins.
OTHER_FOLDERS: Mapping[tuple[str, ...], Rule] = {
    ("adapter_config.json",): rules.ADAPTER,
    ("model_index.json",): rules.DIFFUSERS_PIPELINE,
    ("*.gguf",): rules.GGUF,
    ("snapshots/*/config.json", "models--*/snapshots/*/config.json"): rules.HUB_CACHE,
    ("checkpoint-*/config.json",): rules.TRAINING_RUN,
    ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt"): rules.PICKLED_WEIGHTS,
}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, in the order of their offsets.

    Raises InputError if the file is truncated or too long, if its header is invalid, or if tensors
    overlap or have the wrong size.
    """
    if (kind := unreadable_kind(file)) is not None:
        raise _broken(file, kind)
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size or length > MAX_HEADER_BYTES:
                raise _broken(file, f"{size} bytes, but a header of {length} bytes")
            data = stream.read(length)
    except OSError as error:
        require_working_disk(error, file)
        raise _broken(file, str(error)) from None
    try:
        header = _parsed(data)
        _require_strings(header.pop(METADATA, None))
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in header.items()]
    except RecursionError:
        raise _broken(file, "an invalid header: values are nested too deeply") from None
    except ValueError as error:
        raise _broken(file, f"an invalid header: {error}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _require_contiguous(file, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _parsed(data: bytes) -> dict[str, Any]:
    """Parse a header.

    Raises ValueError for duplicate names and keys. The format forbids duplicates, but safetensors
    accepts some of them and uses the last one.
    """
    header = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("not a JSON object")
    if SURROGATE.search(data):
        json.dumps(header, ensure_ascii=False).encode(
            "utf-8"
        )  # raises ValueError for half of a surrogate pair
    return header


def _require_strings(metadata: object) -> None:
    if metadata is None:  # safetensors treats null as no metadata
        return
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA} is {json_type(metadata)}, not an object of strings")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ValueError(f"{METADATA}: {clip(key, 100)} is {json_type(value)}, not a string")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {clip(twice, 100)} occurs twice")
    return found


def _tensor(file: Path, name: str, entry: Json, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {json_type(entry)}, not an object")
    if missing := [field for field in FIELDS if field not in entry]:
        raise ValueError(f"{name}: no {' and no '.join(missing)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name}: unknown dtype {dtype}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{name}: shape or data_offsets is not a list of the right length")
    sides = tuple(side for side in shape if type(side) is int and 0 <= side <= LARGEST_SIZE)
    start, end = offsets
    if (
        len(sides) != len(shape)
        or type(start) is not int
        or type(end) is not int
        or min(start, end) < 0
    ):
        raise ValueError(f"{name}: shape or data_offsets has a value that is not a size")
    if (end - start) * 8 != math.prod(sides) * BITS[dtype]:
        raise ValueError(f"{name}: {end - start} bytes for shape {shape} in {dtype}")
    return TensorInfo(
        name=name, dtype=dtype, shape=sides, file=file, start=base + start, end=base + end
    )


def _require_contiguous(file: Path, tensors: list[TensorInfo], base: int, size: int) -> None:
    position = base
    for tensor in tensors:
        if tensor.start != position:
            raise _broken(file, f"{tensor.name} at byte {tensor.start} instead of {position}")
        position = tensor.end
    if position != size:
        raise _broken(file, f"{size} bytes, but the header describes {position}")


def _broken(file: Path, reason: str) -> InputError:
    return InputError.of(rules.BROKEN_WEIGHTS, str(file), reason=reason)


class FileStatus(NamedTuple):
    """Size of a file in bytes, and the time of its last change in nanoseconds."""

    size: int
    modified: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """Checkpoint folder as described by its headers.

    `tensors` is in file order. `side_files` are the other files of the folder (tokenizer, template,
    licence). `repeated` are tensors that a later file replaces by a tensor of the same name.

    `statuses` are the statuses of weights, config and tokenizer files before they were read.
    Comparisons of two indexes ignore them.
    """

    root: Path
    config: Mapping[str, Json]
    tensors: Mapping[str, TensorInfo]
    side_files: tuple[Path, ...]
    repeated: tuple[TensorInfo, ...] = ()
    statuses: Mapping[Path, FileStatus] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_bytes * 8 // BITS[tensor.dtype] for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """First model class in config.json."""
        names = self.config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        raise InputError.of(rules.NO_CLASS, str(self.root / "config.json"))


def read_index(root: Path) -> SourceIndex:
    """Read the config and all safetensors headers of a checkpoint folder.

    Raises InputError if the folder, its config or its weights are missing or broken.
    """
    require_checkpoint(root)
    statuses = statuses_of(content_files(root))
    config = read_json_object(root / "config.json")
    tensors: dict[str, TensorInfo] = {}
    repeated: list[TensorInfo] = []
    weights = weight_files(root)
    statuses |= statuses_of(file for file in weights if file not in statuses)
    for file in weights:
        header = read_header(file)
        repeated += [tensors[name] for name in header.keys() & tensors.keys()]
        tensors.update(header)
    return SourceIndex(
        root=root,
        config=config,
        tensors=tensors,
        side_files=tuple(
            path
            for path in sorted(root.iterdir())
            if path.is_file()
            and path.name != "config.json"
            and not FOREIGN_WEIGHTS.match(path.name)
        ),
        repeated=tuple(repeated),
        statuses=statuses,
    )


def status_of(file: Path) -> FileStatus | None:
    """Return the status of a file or of a link's target, or None if it cannot be read."""
    with suppress(OSError):
        status = file.stat()
        return FileStatus(status.st_size, status.st_mtime_ns)
    return None


def statuses_of(files: Iterable[Path]) -> dict[Path, FileStatus]:
    """Return the status of each file that exists."""
    return {file: status for file in files if (status := status_of(file)) is not None}


@contextmanager
def require_unchanged(index: SourceIndex) -> Iterator[None]:
    """Raise InputError at the end of the block if a file's size or time has changed."""
    yield
    for file, before in index.statuses.items():
        if status_of(file) != before:
            raise changed_file_error(
                file, "a different size or modification time than at the start"
            )


def changed_file_error(file: Path, change: str) -> InputError:
    """Return the error for a file that has changed since its header was read."""
    return InputError.of(CHANGED, str(file), change=change)


def folder_digest(root: Path) -> str:
    """Return a digest that changes if a file of a checkpoint is written or replaced."""
    files = sorted({*weight_files(root), *content_files(root)})
    return digest_bytes(
        repr([(str(file.relative_to(root)), status_of(file)) for file in files]).encode()
    )


def headers_digest(index: SourceIndex) -> str:
    """Return the SHA-256 of config.json and of the names, dtypes and shapes of all tensors."""
    tensors = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in index.tensors.values()]
    return digest_bytes(json.dumps([index.config, tensors], sort_keys=True).encode())


def content_files(root: Path) -> list[Path]:
    """Return the files besides weights that are loaded: config, index of the weights, tokenizer."""
    return [
        path
        for path in sorted(root.iterdir())
        if path.suffix in CONTENT_SUFFIXES
        and (path.name == INDEX_NAME or not FOREIGN_WEIGHTS.match(path.name))
        if path.is_file()
    ]


def require_checkpoint(root: Path) -> None:
    """Raise InputError unless `root` is a folder with a config.json and readable files.

    Git LFS must have fetched the files, and they must not be pipes, folders or broken links.
    """
    require_config(root)
    _require_files(root)
    require_fetched(
        sorted(file for file in root.iterdir() if file.suffix.lower() in CONTENT_SUFFIXES)
    )


def vllm_finds_weights(folder: Path) -> bool:
    """Return False if vLLM would not find exactly the weights in `folder`.

    vLLM reads the path as a pattern of glob (`_prepare_weights` in model_loader/default_loader.py).
    A folder `a[1]` does not match its own name, and `a*` also matches a folder `ab`. The folder
    need not exist yet.
    """
    path = folder.absolute()
    if not glob.has_magic(str(path)):
        return True
    if not all(fnmatch.fnmatchcase(part, part) for part in path.parts):
        return False
    found = glob.glob(str(path / f"*{WEIGHTS_SUFFIX}"))  # noqa: PTH207 (vLLM's own call)
    return all(Path(file).parent == path for file in found)


def require_weights_found(folder: Path) -> None:
    """Raise InputError if vLLM would not find exactly the weights in `folder`, by its path."""
    if not vllm_finds_weights(folder):
        path = folder.absolute()
        raise InputError.of(shards.PATTERN_IN_PATH, str(path))


def _require_files(root: Path) -> None:
    """Raise InputErrors for pipes, folders and broken links that loaders would open as files.

    A loader would wait for a pipe forever. If there is an index, weight files that it does not list
    are not checked.
    """
    indexed: list[str] | None = None
    if (root / INDEX_NAME).is_file():
        with suppress(InputError):
            indexed = index_file_names(root)
    problems = []
    for path in sorted(root.iterdir()):
        weights = path.suffix == WEIGHTS_SUFFIX and (indexed is None or path.name in indexed)
        opened = weights or LOADED_FILES.fullmatch(path.name)
        if opened and (kind := unreadable_kind(path)) is not None:
            problems.append(InputError.of(rules.UNREADABLE_FILE, str(path), reason=kind))
    raise_all(problems)


def require_config(root: Path) -> None:
    """Raise InputError unless `root` is a folder with a config.json."""
    config = root / "config.json"
    if not root.exists():
        raise InputError.of(rules.NO_FOLDER, str(root))
    if not root.is_dir():
        rule = rules.GGUF_FILE if root.suffix == ".gguf" else rules.FILE
        raise InputError.of(rule, str(root))
    if (kind := unreadable_kind(config)) is not None:
        raise InputError.of(rules.UNREADABLE_FILE, str(config), reason=kind)
    if not config.is_file():
        raise not_a_checkpoint(root) or InputError.of(rules.NO_CONFIG, str(root))


def weight_files(root: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    They are the files of its index, or the single file, or all safetensors files if there is
    neither. Raises InputError if the index names a missing file or a file outside of the folder.
    """
    if not (root / INDEX_NAME).is_file():
        return _single_or_all(root)
    names = index_file_names(root)
    raise_all([problem for name in names for problem in _shard_problems(root, name)])
    return [root / name for name in names]


def _shard_problems(root: Path, name: str) -> Iterator[InputError]:
    file, index = file_inside(root, name), str(root / INDEX_NAME)
    normal = posixpath.normpath(name)
    if file is None:
        yield InputError.of(rules.NAME_OUTSIDE, index, name=name)
    elif name != normal:
        yield InputError.of(rules.NAME_SPELLING, index, name=name, normal=normal)
    elif not file.is_file():
        reason = unreadable_kind(file) or "no such file"
        yield InputError.of(rules.MISSING_SHARD, str(file), reason=reason)


def _single_or_all(root: Path) -> list[Path]:
    files = (
        [root / SINGLE_NAME]
        if (root / SINGLE_NAME).is_file()
        else sorted(root.glob("*.safetensors"))
    )
    if files:
        return files
    raise not_a_checkpoint(root) or InputError.of(rules.NO_WEIGHTS, str(root))


def index_file_names(root: Path) -> list[str]:
    """Return the shard names in a checkpoint's index, sorted, each once."""
    path = root / INDEX_NAME
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise InputError.of(rules.WEIGHT_MAP, str(path))
    return sorted({str(name) for name in weight_map.values()})


def file_inside(root: Path, name: str) -> Path | None:
    """Return the file that `name` in a checkpoint refers to, or None if it is elsewhere.

    A symbolic link to a file outside of the folder is allowed, because the hub's cache consists of
    such links. A path that leaves the folder is not allowed.
    """
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(root.absolute()):
        path = path.relative_to(root.absolute())
    return None if path.is_absolute() or ".." in path.parts else root / path


def not_a_checkpoint(root: Path) -> InputError | None:
    """Return an error that names the kind of a folder, or None if the kind is unknown."""
    for patterns, rule in OTHER_FOLDERS.items():
        file = next((file for pattern in patterns for file in sorted(root.glob(pattern))), None)
        if file is None:
            continue
        base = ""
        if file.name == "adapter_config.json":
            base = str(read_json_object(file).get("base_model_name_or_path") or "its base model")
        facts = {
            "root": str(root),
            "file": str(file.relative_to(root)),
            "parent": str(file.parent),
            "base": base,
        }
        return InputError.of(rule, str(root), **facts)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """A quantization config, and its place for messages."""

    place: str
    values: Mapping[str, Json]


def find_quantization(root: Path, config: Mapping[str, Json]) -> StoredQuantization | None:
    """Return the quantization config of a checkpoint folder, or None if there is none.

    `config` is the content of its config.json. Sources: get_config in
    vllm/transformers_utils/config.py, get_quantization_config in model_arch_config_convertor.py
    next to it.
    """
    for place, value in _places(root, config):
        if value is not None:
            return (
                StoredQuantization(place=place, values=value) if isinstance(value, dict) else None
            )
    return None


def _places(root: Path, config: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    file = root / "config.json"
    yield f"{file}: {QUANTIZATION_CONFIG}", config.get(QUANTIZATION_CONFIG)
    if (root / SEPARATE_FILE).is_file():
        yield str(root / SEPARATE_FILE), dict(read_json_object(root / SEPARATE_FILE))
    yield f"{file}: {COMPRESSION_CONFIG}", config.get(COMPRESSION_CONFIG)
    text = config.get(TEXT)
    if isinstance(text, dict):
        yield f"{file}: {TEXT}.{QUANTIZATION_CONFIG}", text.get(QUANTIZATION_CONFIG)
        yield f"{file}: {TEXT}.{COMPRESSION_CONFIG}", text.get(COMPRESSION_CONFIG)
