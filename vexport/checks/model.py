"""Does vLLM know the model's class, and does config.json give what the class is built from?"""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from vexport.architectures import architecture_table
from vexport.checks.tensors.kept import narrowed
from vexport.checks.vllm.decoder import DECODERS, layout_of, missing_sizes
from vexport.checks.vllm.fields import code_of, wrong_types
from vexport.checks.vllm.settings import faults
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.types import Finding, Json

NAME = "model"
DESCRIPTION = "vLLM has the model's class, and config.json the sizes and names that it is built from"
# Names of torch dtypes that vLLM takes from a config (_STR_DTYPE_TO_TORCH_DTYPE, config/model.py).
DTYPES = ("bfloat16", "float16", "half", "float32", "float")
# In the place of which it takes one of those.
REPLACED = ("double", "float64", "float8_e4m3fn", "float8_e5m2")
SILU = "silu"
# Classes that put their own layer in the place of the output head, and its layer's names.
CLASSIFIER = ("ForSequenceClassification", "ForTokenClassification")
CLASSIFIES = re.compile(r"(^|\.)(score|classifier|cls|qa_outputs)\.")
# Base models that vLLM registers with a class that generates too (models/registry.py).
GENERATING_BASES = ("Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model")


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on config.json, except its quantization_config."""
    config = view.index.config
    yield from _class(view)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype not in (*DTYPES, *REPLACED):
        yield _wrong(view, "dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    yield from narrowed(view, NAME)
    if view.class_name in DECODERS:
        for key in missing_sizes(view.class_name, config):
            got = repr(config[key]) if key in config else "none: transformers would take its own default"
            yield _wrong(view, key, "a size", got)
        yield from _sizes(view, config)
        for fault in faults(config):
            yield _wrong(view, fault.key, fault.expected, fault.got)
    kind = str(config.get("model_type"))
    if kind in architecture_table().text_models and "auto_map" not in config:
        for fault in wrong_types(kind, config):
            yield _wrong(view, fault.key, fault.expected, fault.got)


def _class(view: CheckpointView) -> Iterator[Finding]:
    config, name = view.index.config, view.class_name
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        yield _wrong(view, "model_type", "transformers' name of the architecture", repr(kind))
    elif config.get("architectures") is not None and not isinstance(config["architectures"], list):
        yield _wrong(view, "architectures", "a list of names", repr(config["architectures"]))
    elif not name:
        yield _wrong(view, "architectures", "the name of the model class", "none, and an unknown model_type")
    elif name not in architecture_table().architectures and not _is_known(name, kind, config):
        table = architecture_table()
        yield _wrong(
            view,
            "architectures",
            f"a class of vLLM {table.vllm} or of transformers",
            f"{name}, of neither",
        )
    elif name.endswith(CLASSIFIER) and not any(CLASSIFIES.search(one) for one in view.index.tensors):
        got = f"{name}, whose output layer the checkpoint does not have"
        yield _wrong(view, "architectures", "a class whose tensors are stored", got)
    elif _is_unknown_type(view, kind) or _is_of_another_type(view, name, kind):
        yield _wrong(view, "model_type", f"the model type of {name}", kind)
    elif not config.get("architectures") and base_of(name) not in GENERATING_BASES:
        got = f"none: vLLM takes {base_of(name)} for model_type {kind}, which gives embeddings and no text"
        yield _wrong(view, "architectures", "the name of the model class", got)
    elif not config.get("architectures"):
        yield warning(
            NAME,
            f"{view.config_path}: architectures",
            expected="the name of the model class",
            got=f"none: vLLM takes {name} for model_type {kind}",
            fix=f'add "architectures": ["{name}"]',
        )


def base_of(name: str) -> str:
    """transformers' base model of a class, which vLLM takes where the config names none (get_config)."""
    return name.replace("ForCausalLM", "Model")


def _is_known(name: str, kind: str, config: Mapping[str, Json]) -> bool:
    """Whether vLLM may run a class that is not in the table: code in the checkpoint, or transformers' own."""
    return "auto_map" in config or any(f"class {name}(" in text for text in _modeling(kind))


@cache
def _modeling(kind: str) -> tuple[str, ...]:
    """transformers' code of a model type."""
    return code_of(kind, "modeling_*.py")


def _sizes(view: CheckpointView, config: Mapping[str, Json]) -> Iterator[Finding]:
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and (keys < 1 or heads % keys):
        yield _wrong(view, "num_key_value_heads", f"a divisor of num_attention_heads {heads}", str(keys))
    activation = config.get("hidden_act", SILU)
    if activation != SILU and DECODERS[view.class_name].silu:
        yield _wrong(view, "hidden_act", SILU, repr(activation))


def _wrong(view: CheckpointView, key: str, expected: str, got: str) -> Finding:
    return error(
        NAME,
        f"{view.config_path}: {key}",
        expected=expected,
        got=got,
        fix="take the model's original config.json",
    )


def _is_unknown_type(view: CheckpointView, kind: str) -> bool:
    """Whether transformers has no config for a model type; said only of classes whose config is its own."""
    own = view.class_name in DECODERS and "auto_map" not in view.index.config
    return own and kind not in architecture_table().text_models and not _modeling(kind)


def _is_of_another_type(view: CheckpointView, name: str, kind: str) -> bool:
    """Whether a class belongs to one model type and the config to another, and the tensors do not fit."""
    models = architecture_table().text_models
    if name not in models.values() or models.get(kind, name) == name:
        return False
    own, layout = layout_of(models[kind], view.index.config), view.layout
    return layout is None or bool(
        own and (own.parameters.keys() - layout.parameters.keys()) & view.index.tensors.keys()
    )
