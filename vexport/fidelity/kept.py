"""Compare everything that is not quantized with the source: tensors, configs and tokenizer.

A difference is an error if vLLM refuses to load the checkpoint, or if responses silently change.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from vexport.architectures.linears import PREDICTION
from vexport.architectures.rotary import DESCRIPTIONS
from vexport.checkpoint.chat_template import FILE, chat_templates
from vexport.checkpoint.index import SourceIndex
from vexport.checkpoint.reader import Reader, same_bytes
from vexport.checkpoint.tensors import TORCH_DTYPES, read_tensor
from vexport.checks.tokenizer import TOKENIZER, open_tokenizer
from vexport.checks.vllm.view import CheckpointView
from vexport.errors import InputError
from vexport.fidelity.source import SourceTensors
from vexport.files import read_json
from vexport.records import Finding, Json, TensorInfo
from vexport.rules import source as rules

# Tensors that vLLM computes and does not load (AutoWeightsLoader, load_weights of its models).
COMPUTED_TENSORS = re.compile(
    r".*\b(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)$"
)
# Scales of the KV cache and of queries, which only the quantized checkpoint has.
ADDED_SCALES = re.compile(r".*\b[qkv]_scale$|.*\bkv_scale$")
NORM = re.compile(r".*norm\.weight$")
# A name in a stack of layers. The group is the module that contains the stack.
STACK = re.compile(r"(.+?)\.\w+\.\d+\.")
EMBEDDING = "model.embed_tokens.weight"
TIED_HEADS = ("lm_head.weight", "embed_out.weight")
# Parts of tokenizer.json that determine a prompt's token ids or a response's text. The other parts
# are the version, and settings that callers choose (truncation, padding).
TOKENIZER_PARTS = (
    "model",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
)
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
)
# Keys of tokenizer_config.json that change token ids or the end of a response.
TOKENIZER_KEYS = ("bos_token", "eos_token", "add_bos_token", "add_eos_token", "add_prefix_space")
# Keys that vLLM reads from generation_config.json by default: ModelConfig.get_diff_sampling_param
# (vllm/config/model.py) and SamplingParams.update_from_generation_config (vllm/sampling_params.py).
GENERATION_KEYS = (
    "eos_token_id",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)
# Keys of config.json that describe the file, its storage or the training instead of the model, and
# keys that other checks report in more detail.
IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "compression_config",
        "dtype",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Keys that change a model's responses and are unset by default.
KEYS_WITHOUT_DEFAULT = ("logit_scale", "partial_rotary_factor", "rope_scaling", "sliding_window")
# Keys of a config as the installed transformers writes it. Their values are compared in this form,
# because versions of transformers write other keys, or because the default depends on the model.
STANDARD_KEYS = frozenset({"logit_scale", "rope_parameters", "sliding_window"})
# Names of these keys and of their parts in all versions of transformers.
SPELLINGS = STANDARD_KEYS | {
    *("rope_theta", "rope_scaling", "partial_rotary_factor"),
    *("rope_local_base_freq", "use_sliding_window"),
}
PREPROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def tensor_findings(
    view: CheckpointView, origins: SourceTensors, quantized: Set[str], explained: Set[str]
) -> Iterator[Finding]:
    """Yield findings on unquantized tensors that differ from the source.

    Additional and missing tensors are reported, too. `explained` contains the names of norms that
    differ because the layers after them were smoothed. Parts beside the text model (towers,
    projectors) are named if all their tensors equal the source's.
    """
    equal: list[str] = []
    changed: set[str] = set()
    for name, tensor in view.index.tensors.items():
        module, _, parameter = name.rpartition(".")
        if (
            ADDED_SCALES.match(name)
            or name in explained
            or (module in quantized and parameter != "bias")
        ):
            continue
        found = [*_unquantized_findings(view, origins, tensor)]
        yield from found
        if found:
            changed.add(name)
        else:
            equal.append(name)
    origins.release()
    for tensor in origins.missing():
        yield from _missing_finding(view, tensor)
        changed.add(tensor.name)
    if view.model.text != view.index.config:
        stacks = {match[1] for name in quantized if (match := STACK.match(name))}
        yield from _kept_parts(equal, changed, stacks)


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to, such as `model.vision_tower`."""
    first, _, rest = name.partition(".")
    second, _, inside = rest.partition(".")
    return f"{first}.{second}" if first == "model" and inside else first


def _kept_parts(equal: Sequence[str], changed: Set[str], stacks: Set[str]) -> Iterator[Finding]:
    """Yield a note for each part beside the quantized layers that equals the source's part.

    `equal` and `changed` are names of kept tensors. `stacks` are the modules that contain the
    quantized layers, such as `model.language_model`.
    """
    beside = [
        name
        for name in equal
        if not name.startswith(tuple(f"{stack}." for stack in stacks))
        and not name.endswith(TIED_HEADS)
    ]
    damaged = {part_of(name) for name in changed}
    for part, tensors in Counter(map(part_of, beside)).items():
        if part not in damaged:
            yield Finding.at(rules.KEPT_PART, part, tensors=tensors)


def _unquantized_findings(
    view: CheckpointView, origins: SourceTensors, tensor: TensorInfo
) -> Iterator[Finding]:
    origin = origins.tensor(tensor.name)
    if origin is None and tensor.name.endswith(TIED_HEADS) and _is_tied(view):
        origin = origins.tensor(EMBEDDING)
    if origin is None:
        yield from _compare_regrouped(view, origins, tensor)
        return
    if same_bytes(origins.reader, origin, view.reader, tensor):
        return
    if origin.shape == tensor.shape and _same_values(origins.reader, origin, view.reader, tensor):
        yield Finding.at(
            rules.CHANGED_DTYPE, tensor.name, dtype=tensor.dtype, source_dtype=origin.dtype
        )
        return
    if NORM.match(tensor.name) and _is_offset_norm(origins.reader, origin, view.reader, tensor):
        return
    yield Finding.at(
        rules.CHANGED_TENSOR,
        tensor.name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        source_dtype=origin.dtype,
        source_shape=list(origin.shape),
    )


def _is_tied(view: CheckpointView) -> bool:
    return bool(view.model.text.get("tie_word_embeddings", False))


def _same_values(old: Reader, origin: TensorInfo, new: Reader, tensor: TensorInfo) -> bool:
    if (
        origin.dtype == tensor.dtype
        or origin.dtype not in TORCH_DTYPES
        or tensor.dtype not in TORCH_DTYPES
    ):
        return False
    values = read_tensor(new, tensor)
    return torch.equal(read_tensor(old, origin).to(values.dtype), values)


def _is_offset_norm(old: Reader, origin: TensorInfo, new: Reader, tensor: TensorInfo) -> bool:
    """Return True if a norm equals (w + 1) - 1, where w is the source's norm.

    Some norms multiply by 1 + w (Gemma, Qwen3-Next). llm-compressor replaces w by 1 + w during
    calibration and subtracts 1 afterwards, which rounds the weight (norm_calibration_context in
    llmcompressor/modeling/offset_norm.py).
    """
    if (origin.shape, origin.dtype) != (
        tensor.shape,
        tensor.dtype,
    ) or origin.dtype not in TORCH_DTYPES:
        return False
    return torch.equal((read_tensor(old, origin) + 1) - 1, read_tensor(new, tensor))


def _compare_regrouped(
    view: CheckpointView, origins: SourceTensors, tensor: TensorInfo
) -> Iterator[Finding]:
    layer = view.layers.by_name.get(tensor.name.removesuffix(".weight"))
    pieces = origins.pieces(layer) if layer is not None and tensor.dtype in TORCH_DTYPES else ()
    if not pieces:
        yield Finding.at(rules.ADDED_TENSOR, tensor.name)
        return
    values = read_tensor(view.reader, tensor)
    if not torch.equal(values, torch.cat([*pieces]).to(values.dtype)):
        yield Finding.at(rules.CHANGED_WEIGHT, tensor.name)


def _missing_finding(view: CheckpointView, tensor: TensorInfo) -> Iterator[Finding]:
    if COMPUTED_TENSORS.match(tensor.name) or (_is_tied(view) and tensor.name.endswith(TIED_HEADS)):
        return
    is_draft = PREDICTION.search(tensor.name)
    yield Finding.at(rules.MISSING_DRAFT_LAYER if is_draft else rules.MISSING_TENSOR, tensor.name)


def file_findings(index: SourceIndex, source: SourceIndex) -> Iterator[Finding]:
    """Yield findings on configs, tokenizers and chat templates that differ from the source's.

    Differences that do not affect vLLM are skipped.
    """
    for key, old, new in config_differences(source.config, index.config):
        where = f"{index.root / 'config.json'}: {key}"
        yield Finding.at(rules.CHANGED_VALUE, where, value=new, source=old)
    yield from _tokenizer(index.root, source.root)
    yield from _template(index.root, source.root)
    generation, before = (
        _object(root / "generation_config.json") for root in (index.root, source.root)
    )
    yield from _keys(index.root / "generation_config.json", before, generation, GENERATION_KEYS)
    for name in PREPROCESSORS:
        if (source.root / name).is_file() and not (index.root / name).is_file():
            yield Finding.at(rules.MISSING_FILE, str(index.root / name))


def config_differences(
    old: Mapping[str, Json], new: Mapping[str, Json]
) -> Iterator[tuple[str, Json, Json]]:
    """Yield the keys of config.json with different values, and both values.

    Rotary embeddings and sliding windows are compared as transformers reads them, because their
    keys differ between versions of transformers. If transformers does not have the model's class,
    they are compared like all other keys.
    """
    before, after = _standard_config(old), _standard_config(new)
    if before is None or after is None:
        yield from _different(old, new)
        return
    yield from _different(old, new, skipped=SPELLINGS)
    for path, value, changed in _different_standard(before, after):
        yield _stored_place(path, new, old), value, changed


def _different(
    old: Mapping[str, Json],
    new: Mapping[str, Json],
    prefix: str = "",
    *,
    skipped: Set[str] = frozenset(),
) -> Iterator[tuple[str, Json, Json]]:
    """Yield keys that are in both configs with different values, except for `skipped`.

    If only one config has a key, the key is assumed to be a default of another version, and is
    ignored. A key in KEYS_WITHOUT_DEFAULT is not ignored if only the new config has it.
    """
    for key in sorted(old.keys() & new.keys() - IGNORED_KEYS - skipped):
        before, after = old[key], new[key]
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _different(before, after, f"{prefix}{key}.", skipped=skipped)
        elif None not in (before, after) and before != after:
            yield f"{prefix}{key}", before, after
    for key in KEYS_WITHOUT_DEFAULT:
        if key not in skipped and old.get(key) is None and new.get(key) is not None:
            yield f"{prefix}{key}", None, new[key]


def _standard_config(config: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """Return a config with the keys of the installed transformers, including all defaults.

    Return None if transformers does not have the model's class, or if the class refuses the config.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    values = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        # Some classes add a key only to the config that they write.
        written = CONFIG_MAPPING[kind].from_dict(values).to_dict()
        standard: dict[str, Json] = CONFIG_MAPPING[kind].from_dict(written).to_dict()
    except Exception:  # each class of transformers raises other errors for wrong values
        return None
    finally:
        transformers_logging.set_verbosity(verbosity)
    return standard


def _different_standard(
    old: Mapping[str, Json], new: Mapping[str, Json], prefix: str = ""
) -> Iterator[tuple[str, Json, Json]]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if key in STANDARD_KEYS:
            yield from _different_leaves(before, after, f"{prefix}{key}")
        elif isinstance(before, dict) and isinstance(after, dict):
            yield from _different_standard(before, after, f"{prefix}{key}.")


def _different_leaves(old: Json, new: Json, path: str) -> Iterator[tuple[str, Json, Json]]:
    """Yield different values, by their paths, in nested dictionaries.

    If `rope_type` differs, only this is yielded, because other types have other parameters. `type`
    is skipped: it is an older name of `rope_type`.
    """
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield path, old, new
        return
    keys = (old.keys() | new.keys()) - {"type"}
    if old.get("rope_type") != new.get("rope_type"):
        keys = {"rope_type"}
    for key in sorted(keys):
        yield from _different_leaves(old.get(key), new.get(key), f"{path}.{key}")


def _stored_place(path: str, *configs: Mapping[str, Json]) -> str:
    """Return the path of a standard key in the first of `configs` that stores it.

    Only parameters of rotary embeddings have other paths. Any other path is returned unchanged.
    """
    *parents, name = path.split(".")
    if parents[-1:] != ["rope_parameters"]:
        return path
    around = parents[:-1]
    for config in configs:
        part: Json = dict(config)
        for parent in around:
            part = part.get(parent) if isinstance(part, dict) else None
        if isinstance(part, dict):
            for dictionary in DESCRIPTIONS:
                values = part.get(dictionary)
                if isinstance(values, dict) and name in values:
                    return ".".join((*around, dictionary, name))
            if name in part:
                return ".".join((*around, name))
    return path


def _tokenizer(root: Path, source: Path) -> Iterator[Finding]:
    had = [name for name in VOCABULARIES if (source / name).is_file()]
    if had and not any((root / name).is_file() for name in VOCABULARIES):
        yield Finding.at(rules.MISSING_TOKENIZER, str(root / had[0]))
        return
    old, new = _read_tokenizer(source / TOKENIZER), _read_tokenizer(root / TOKENIZER)
    for part in TOKENIZER_PARTS if old and new else ():
        if old.get(part) != new.get(part):
            yield Finding.at(rules.CHANGED_TOKENIZER, f"{root / TOKENIZER}: {part}")
    for name in VOCABULARIES[1:]:
        before, after = source / name, root / name
        if before.is_file() and after.is_file() and before.read_bytes() != after.read_bytes():
            yield Finding.at(rules.CHANGED_VOCABULARY, str(root / name))
    old, new = _object(source / "tokenizer_config.json"), _object(root / "tokenizer_config.json")
    yield from _keys(root / "tokenizer_config.json", old, new, TOKENIZER_KEYS)


def _read_tokenizer(path: Path) -> Mapping[str, Json]:
    """Load a tokenizer.json with `tokenizers`, and return it in the current version of the format.

    Returns an empty mapping if there is no readable file.
    """
    try:
        content: Mapping[str, Json] = (
            json.loads(open_tokenizer(path).to_str()) if path.is_file() else {}
        )
    except InputError:
        return {}
    return content


def _template(root: Path, source: Path) -> Iterator[Finding]:
    old, new = _templates(source), _templates(root)
    where = str(root / FILE)
    if old and not new:
        yield Finding.at(rules.MISSING_TEMPLATE, where)
    elif old and old != new:
        yield Finding.at(rules.CHANGED_TEMPLATE, where)
    elif new and not old:
        yield Finding.at(rules.ADDED_TEMPLATE, where)


def _templates(root: Path) -> Mapping[str, str]:
    try:
        return {name: text.rstrip("\n") for name, text in chat_templates(root).items()}
    except InputError:
        return {}


def _keys(
    path: Path, old: Mapping[str, Json], new: Mapping[str, Json], keys: Iterable[str]
) -> Iterator[Finding]:
    for key in keys:
        before, after = _token(old.get(key)), _token(new.get(key))
        where = f"{path}: {key}"
        if before != after and before is not None:
            yield Finding.at(rules.CHANGED_VALUE, where, value=after, source=before)
        elif before != after and path.name.startswith("generation"):
            yield Finding.at(rules.ADDED_VALUE, where, value=after)


def _token(value: Json) -> Json:
    if isinstance(value, dict):
        return value.get("content")
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _object(path: Path) -> Mapping[str, Json]:
    try:
        value = read_json(path)
    except InputError:
        return {}
    return value if isinstance(value, dict) else {}
