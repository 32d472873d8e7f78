"""Check that vLLM has the model's class, and that config.json has the keys that vLLM needs."""

import re
from collections.abc import Iterator, Mapping

from vexport.architectures import (
    REMOVED,
    architecture_table,
    exclusion_reason,
    transformers_models,
    transformers_table,
)
from vexport.architectures.config import text_config
from vexport.architectures.layout import impossible_size, layout_of, missing_sizes, oversized
from vexport.architectures.layout_table import ClassLayout, get_layout
from vexport.architectures.rotary import PARTIAL, table_bytes, wrong_numbers
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Finding, Json, NotJudged
from vexport.rules import model as rules
from vexport.version import short_version

DESCRIPTION = (
    "vLLM supports the model's class, and config.json has the names and sizes that it needs"
)
FLOAT16_NAMES = ("float16", "half")
# Classes that replace the output head by another layer, and the names of that layer.
CLASSIFIER = ("ForSequenceClassification", "ForTokenClassification")
CLASSIFIER_LAYERS = re.compile(r"(^|\.)(score|classifier|cls|qa_outputs)\.")
# End of the name of a class with an output head. Its base model ends in `Model`.
WITH_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")
# Base models that vLLM registers with a class that can also generate text (models/registry.py).
GENERATING_BASES = ("Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model")
# Largest plausible epsilon of an RMSNorm. Trained models have 1e-8 to 1e-5.
LARGEST_EPSILON = 0.01
# Largest plausible position table. In 2026, no model has more than 10,485,760 positions. With heads
# of 128, the table for so many positions has 2.5 GiB in bfloat16.
MAX_TABLE_BYTES = 8 << 30
MAX_LABELS = 1_000_000


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on config.json, except its quantization_config."""
    config = view.index.config
    yield from _class(view)
    yield from _overflowing_dtype(view)
    yield from _positions(view)
    yield from _labels(view)
    place = view.config_path
    if impossible := impossible_size(config, len(view.index.tensors)):
        key, reason = impossible
        yield Finding.at(rules.IMPOSSIBLE_COUNT, f"{place}: {key}", reason=reason)
        return
    entry = get_layout(view.model.class_name, view.model.version)
    if entry is not None:
        for key, value in oversized(entry, config):
            yield Finding.at(rules.LARGE_SIZE, f"{place}: {key}", value=value)
        for key in missing_sizes(entry, config):
            if key in config:
                yield Finding.at(rules.SIZE, f"{place}: {key}", value=config[key])
            else:
                yield Finding.at(rules.NO_SIZE, f"{place}: {key}")
        yield from _sizes(view, entry, text_config(config))


def _overflowing_dtype(view: CheckpointView) -> Iterator[Finding]:
    """Report a config with dtype float16 for a model in bfloat16: large values overflow in float16.

    If other tensors are stored in float16, the producer chose float16 on purpose, and the finding
    is a warning. AutoRound converts models to float16 for AWQ and GPTQ.
    """
    config = view.index.config
    dtype = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    stored = {
        tensor.dtype for name, tensor in view.index.tensors.items() if name.endswith("norm.weight")
    }
    if dtype in FLOAT16_NAMES and stored == {"BF16"}:
        meant = any(tensor.dtype == "F16" for tensor in view.index.tensors.values())
        rule = rules.OVERFLOWING_DTYPE.as_warning if meant else rules.OVERFLOWING_DTYPE
        yield Finding.at(rule, f"{view.config_path}: dtype", dtype=dtype)


def _class(view: CheckpointView) -> Iterator[Finding]:
    """Yield the findings of the first rule that fails. Later rules depend on earlier ones."""
    steps = (
        _invalid_names,
        _unknown_class,
        _missing_output_layer,
        _wrong_model_type,
        _missing_class_name,
    )
    yield from next((findings for step in steps if (findings := [*step(view)])), [])


def _invalid_names(view: CheckpointView) -> Iterator[Finding]:
    kind, names = view.index.config.get("model_type"), view.index.config.get("architectures")
    if not isinstance(kind, str) or not kind:
        yield Finding.at(rules.MODEL_TYPE_NAME, f"{view.config_path}: model_type", value=kind)
    elif names is not None and not isinstance(names, list):
        yield Finding.at(rules.ARCHITECTURES, f"{view.config_path}: architectures", value=names)


def _unknown_class(view: CheckpointView) -> Iterator[Finding]:
    """Report a class that neither vLLM, nor transformers, nor code in the checkpoint defines.

    Classes in vLLM's registry that are not in the table of classes are not checked: see
    `class_not_judged`.
    """
    name, table = view.model.class_name, architecture_table(view.model.version)
    where = f"{view.config_path}: architectures"
    if not name:
        yield Finding.at(rules.NO_CLASS, where)
        return
    of_transformers = transformers_models(_kind(view), view.model.version) or ()
    has_code = "auto_map" in view.index.config or name in of_transformers
    newer = name in view.model.facts.added
    if name in table.architectures or has_code or newer:
        return
    reason = exclusion_reason(name, view.model.version)
    if reason is None or reason.startswith(REMOVED):
        version, reason = short_version(view.model.version), reason or "an unknown class"
        yield Finding.at(rules.UNKNOWN_CLASS, where, model=name, reason=reason, version=version)


def class_not_judged(view: CheckpointView) -> Iterator[NotJudged]:
    """Yield why the class is not checked, if vLLM has it but the table of classes does not."""
    name = view.model.class_name
    reason = (
        exclusion_reason(name, view.model.version) if name not in view.model.facts.added else None
    )
    if reason is not None and not reason.startswith(REMOVED):
        yield NotJudged(what=f"the layers of {name} in vLLM", why=reason)


def _missing_output_layer(view: CheckpointView) -> Iterator[Finding]:
    name = view.model.class_name
    if name.endswith(CLASSIFIER) and not any(
        CLASSIFIER_LAYERS.search(tensor) for tensor in view.index.tensors
    ):
        where = f"{view.config_path}: architectures"
        yield Finding.at(rules.NO_OUTPUT_LAYER, where, model=name)


def _wrong_model_type(view: CheckpointView) -> Iterator[Finding]:
    """Report a model type that transformers does not have, or that does not fit the stored tensors.

    An unknown model type is only reported if vexport knows the layout of the class and config.json
    does not refer to code in the checkpoint (auto_map).
    """
    name, kind, config = view.model.class_name, _kind(view), view.index.config
    models = architecture_table(view.model.version).text_models
    where = f"{view.config_path}: model_type"
    known_class = get_layout(name, view.model.version) is not None and "auto_map" not in config
    known_kind = kind in models or transformers_models(kind, view.model.version) is not None
    if known_class and not known_kind:
        yield Finding.at(rules.MODEL_TYPE, where, value=kind, model=name)
    elif name in models.values() and models.get(kind, name) != name:
        meant = layout_of(
            models[kind], config, view.model.architecture, view.index.tensors, view.model.version
        )
        layout = view.model.layout
        missing = meant and layout and meant.parameters.keys() - layout.parameters.keys()
        if layout is None or missing and missing & view.index.tensors.keys():
            yield Finding.at(rules.MODEL_TYPE, where, value=kind, model=name)


def _missing_class_name(view: CheckpointView) -> Iterator[Finding]:
    name, kind = view.model.class_name, _kind(view)
    # Base model of transformers. vLLM uses it if the config names no class (get_config).
    base = WITH_HEAD.sub("Model", name)
    if view.index.config.get("architectures"):
        return
    where = f"{view.config_path}: architectures"
    if base in GENERATING_BASES:
        yield Finding.at(rules.ASSUMED_CLASS, where, model=name, kind=kind)
    else:
        yield Finding.at(rules.EMBEDDING_CLASS, where, base=base, kind=kind)


def _kind(view: CheckpointView) -> str:
    return str(view.index.config.get("model_type"))


def _sizes(
    view: CheckpointView, entry: ClassLayout, config: Mapping[str, Json]
) -> Iterator[Finding]:
    place = view.config_path
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    sized = any("num_key_value_heads" in side for row in entry.rows for side in row.shape or ())
    if sized and isinstance(heads, int) and isinstance(keys, int) and (keys < 1 or heads % keys):
        where = f"{place}: num_key_value_heads"
        yield Finding.at(rules.KEY_VALUE_HEADS, where, value=keys, heads=heads)
    # vLLM accepts any epsilon without an error.
    epsilon = config.get("rms_norm_eps", LARGEST_EPSILON)
    if isinstance(epsilon, float) and not 0 <= epsilon <= LARGEST_EPSILON:
        where = f"{place}: rms_norm_eps"
        yield Finding.at(rules.EPSILON, where, value=epsilon, most=LARGEST_EPSILON)
    # vLLM also accepts two different descriptions of RoPE, and uses only one of them.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    kinds = [
        each.get("rope_type", each.get("type")) for each in (new, old) if isinstance(each, dict)
    ]
    scaled = any(kind not in ("default", None) for kind in kinds)
    if isinstance(new, dict) and isinstance(old, dict) and new != old and scaled:
        yield Finding.at(rules.ROPE_SCALING, f"{place}: rope_scaling", old=old, new=new)


def _positions(view: CheckpointView) -> Iterator[Finding]:
    accepted = transformers_table(view.model.version).accepted
    for key, value in wrong_numbers(view.index.config, accepted):
        is_share = key.rpartition(".")[2] in PARTIAL
        rule = rules.ROTATED_SHARE if is_share else rules.ROPE_VALUE
        yield Finding.at(rule, f"{view.config_path}: {key}", value=value)
    num_bytes = table_bytes({"dtype": view.index.config.get("dtype"), **view.model.text})
    if num_bytes > MAX_TABLE_BYTES:
        where = f"{view.config_path}: max_position_embeddings"
        size, most = num_bytes / (1 << 30), MAX_TABLE_BYTES >> 30
        yield Finding.at(rules.POSITION_TABLE, where, size=size, most=most)


def _labels(view: CheckpointView) -> Iterator[Finding]:
    """Report a number of labels so large that transformers' label names would fill the memory."""
    count = view.index.config.get("num_labels")
    if isinstance(count, int) and count > MAX_LABELS:
        where = f"{view.config_path}: num_labels"
        yield Finding.at(rules.LABELS, where, value=count, most=MAX_LABELS)
