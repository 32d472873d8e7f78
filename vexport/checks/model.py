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
from vexport.architectures.config import shown, text_config
from vexport.architectures.layout import impossible_size, layout_of, missing_sizes, oversized
from vexport.architectures.layout_table import ClassLayout, get_layout
from vexport.architectures.rotary import table_bytes, wrong_numbers
from vexport.checks.vllm.findings import error, warning
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Claim, Finding, Json, NotJudged
from vexport.version import short_version

NAME = "model"
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
    if impossible := impossible_size(config, len(view.index.tensors)):
        key, got = impossible
        yield _config_finding(
            view, key, "a number that fits the stored tensors", got, claim="values"
        )
        return
    entry = get_layout(view.model.class_name, view.model.version)
    if entry is not None:
        for key, value in oversized(entry, config):
            yield _config_finding(
                view, key, "a possible size of a tensor", shown(value), claim="refused"
            )
        for key in missing_sizes(entry, config):
            got = (
                shown(config[key])
                if key in config
                else "no such key: transformers would use its default"
            )
            yield _config_finding(
                view,
                key,
                "a whole number above zero",
                got,
                claim="refused" if key in config else "values",
            )
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
        where = f"{view.config_path}: dtype"
        expected = "bfloat16, in which the norms are stored"
        got = f"{dtype}: vLLM would run the model in {dtype}, and large values would overflow"
        finding = warning if meant else error
        yield finding(
            NAME, where, claim="values", expected=expected, got=got, fix="set dtype to bfloat16"
        )


def _class(view: CheckpointView) -> Iterator[Finding]:
    """Yield the findings of the first rule that fails. Later rules depend on earlier ones."""
    rules = (
        _invalid_names,
        _unknown_class,
        _missing_output_layer,
        _wrong_model_type,
        _missing_class_name,
    )
    yield from next((findings for rule in rules if (findings := [*rule(view)])), [])


def _invalid_names(view: CheckpointView) -> Iterator[Finding]:
    kind, names = view.index.config.get("model_type"), view.index.config.get("architectures")
    if not isinstance(kind, str) or not kind:
        yield _config_finding(
            view,
            "model_type",
            "transformers' name of the architecture",
            shown(kind),
            claim="refused",
        )
    elif names is not None and not isinstance(names, list):
        yield _config_finding(
            view, "architectures", "a list of names", shown(names), claim="refused"
        )


def _unknown_class(view: CheckpointView) -> Iterator[Finding]:
    """Report a class that neither vLLM, nor transformers, nor code in the checkpoint defines.

    Classes in vLLM's registry that are not in the table of classes are not checked: see
    `class_not_judged`.
    """
    name, table = view.model.class_name, architecture_table(view.model.version)
    if not name:
        got = "no such key, and an unknown model_type"
        yield _config_finding(
            view, "architectures", "the name of the model class", got, claim="refused"
        )
        return
    of_transformers = transformers_models(_kind(view), view.model.version) or ()
    has_code = "auto_map" in view.index.config or name in of_transformers
    newer = name in view.model.facts.added
    if name in table.architectures or has_code or newer:
        return
    reason = exclusion_reason(name, view.model.version)
    if reason is None or reason.startswith(REMOVED):
        expected = f"a class of vLLM {short_version(view.model.version)} or of transformers"
        got = f"{name}, an unknown class" if reason is None else f"{name}: {reason}"
        yield _config_finding(view, "architectures", expected, got, claim="refused")


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
        got = f"{name}, but no tensor of its output layer"
        yield _config_finding(
            view, "architectures", "a class with all its tensors stored", got, claim="values"
        )


def _wrong_model_type(view: CheckpointView) -> Iterator[Finding]:
    """Report a model type that transformers does not have, or that does not fit the stored tensors.

    An unknown model type is only reported if vexport knows the layout of the class and config.json
    does not refer to code in the checkpoint (auto_map).
    """
    name, kind, config = view.model.class_name, _kind(view), view.index.config
    models = architecture_table(view.model.version).text_models
    known_class = get_layout(name, view.model.version) is not None and "auto_map" not in config
    known_kind = kind in models or transformers_models(kind, view.model.version) is not None
    if known_class and not known_kind:
        yield _config_finding(view, "model_type", f"the model type of {name}", kind, claim="values")
    elif name in models.values() and models.get(kind, name) != name:
        meant = layout_of(
            models[kind], config, view.model.architecture, view.index.tensors, view.model.version
        )
        layout = view.model.layout
        missing = meant and layout and meant.parameters.keys() - layout.parameters.keys()
        if layout is None or missing and missing & view.index.tensors.keys():
            yield _config_finding(
                view, "model_type", f"the model type of {name}", kind, claim="values"
            )


def _missing_class_name(view: CheckpointView) -> Iterator[Finding]:
    name, kind = view.model.class_name, _kind(view)
    # Base model of transformers. vLLM uses it if the config names no class (get_config).
    base = WITH_HEAD.sub("Model", name)
    if view.index.config.get("architectures"):
        return
    where, expected = f"{view.config_path}: architectures", "the name of the model class"
    if base not in GENERATING_BASES:
        got = f"no such key: vLLM would use {base} for {kind}, which computes embeddings, not text"
        yield _config_finding(view, "architectures", expected, got, claim="values")
        return
    got = f"no such key: vLLM uses {name} for model_type {kind}"
    fix = f'add "architectures": ["{name}"]'
    yield warning(NAME, where, claim="values", expected=expected, got=got, fix=fix)


def _kind(view: CheckpointView) -> str:
    return str(view.index.config.get("model_type"))


def _sizes(
    view: CheckpointView, entry: ClassLayout, config: Mapping[str, Json]
) -> Iterator[Finding]:
    """Report implausible KV heads, an implausible epsilon, and contradictory RoPE settings."""
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    sized = any("num_key_value_heads" in side for row in entry.rows for side in row.shape or ())
    if sized and isinstance(heads, int) and isinstance(keys, int) and (keys < 1 or heads % keys):
        yield _config_finding(
            view,
            "num_key_value_heads",
            f"a divisor of num_attention_heads {shown(heads)}",
            shown(keys),
            claim="refused",
        )
    # vLLM accepts any epsilon without an error.
    epsilon = config.get("rms_norm_eps", LARGEST_EPSILON)
    if isinstance(epsilon, float) and not 0 <= epsilon <= LARGEST_EPSILON:
        yield _config_finding(
            view,
            "rms_norm_eps",
            f"a number from 0 to {LARGEST_EPSILON}",
            shown(epsilon),
            claim="values",
        )
    # vLLM also accepts two different descriptions of RoPE, and uses only one of them.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    kinds = [
        each.get("rope_type", each.get("type")) for each in (new, old) if isinstance(each, dict)
    ]
    scaled = any(kind not in ("default", None) for kind in kinds)
    if isinstance(new, dict) and isinstance(old, dict) and new != old and scaled:
        got = f"{shown(old)}, but different rope_parameters {shown(new)}"
        yield _config_finding(
            view,
            "rope_scaling",
            "the same values as rope_parameters, or no key",
            got,
            claim="values",
        )


def _positions(view: CheckpointView) -> Iterator[Finding]:
    """Report invalid numbers in RoPE settings, and position tables that do not fit into memory."""
    accepted = transformers_table(view.model.version).accepted
    for wrong in wrong_numbers(view.index.config, accepted):
        yield _config_finding(view, wrong.key, wrong.need, shown(wrong.value), claim="values")
    num_bytes = table_bytes({"dtype": view.index.config.get("dtype"), **view.model.text})
    if num_bytes > MAX_TABLE_BYTES:
        expected = f"a rotary table of at most {MAX_TABLE_BYTES >> 30} GiB"
        got = (
            f"a rotary table of {num_bytes / (1 << 30):,.0f} GiB, which vLLM computes on each GPU "
            f"at startup"
        )
        fix = (
            "set max_position_embeddings and the factor in rope_parameters to the values that the "
            "model was trained with"
        )
        where = f"{view.config_path}: max_position_embeddings"
        yield warning(NAME, where, claim="values", expected=expected, got=got, fix=fix)


def _labels(view: CheckpointView) -> Iterator[Finding]:
    """Report a number of labels so large that transformers' label names would fill the memory."""
    count = view.index.config.get("num_labels")
    if isinstance(count, int) and count > MAX_LABELS:
        expected = f"at most {MAX_LABELS:,}, because transformers creates a name for each label"
        yield _config_finding(view, "num_labels", expected, shown(count), claim="refused")


def _config_finding(
    view: CheckpointView, key: str, expected: str, got: str, *, claim: Claim
) -> Finding:
    fix = "use the model's original config.json"
    return error(
        NAME, f"{view.config_path}: {key}", claim=claim, expected=expected, got=got, fix=fix
    )
