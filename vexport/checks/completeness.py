"""Check that no tensor is missing or unexpected.

vLLM silently leaves the parameters of missing tensors uninitialized.
"""

import re
from collections.abc import Iterator, Mapping

from vexport.architectures.built import DRAFTS
from vexport.architectures.fusion import FusedLayer, part_names
from vexport.architectures.layout import ModelLayout, impossible_size
from vexport.architectures.stored import (
    AUXILIARY_PARAMETERS,
    QUANTIZED_PARAMETERS,
    joined_name,
    quantized_parameters,
    split_name,
)
from vexport.checkpoint.reader import same_bytes
from vexport.checks.vllm.groups import INPUT, OUTPUT, ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Finding, NotJudged
from vexport.rules import completeness as rules
from vexport.words import first_and_more

WEIGHTS = QUANTIZED_PARAMETERS | AUXILIARY_PARAMETERS | {"weight"}
DESCRIPTION = (
    "every layer, fused part and decoder layer has all its tensors, and no tensor is unexpected"
)
LAYERS = "layers"
EXPERTS = ".experts."
LAYER = re.compile(r"\.layers\.\d+$")
# Names of the embeddings and the output head, in text models and within multimodal models.
TABLES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
HEADS = tuple(
    f"{model}lm_head.{weight}"
    for model in ("", "language_model.")
    for weight in ("weight", "weight_packed")
)
# Tensors that vLLM drops or uses for the KV cache in every class. Sources: AutoWeightsLoader in
# models/utils.py, and get_cache_scale_mapper and _ignore_unexpected_suffixes in
# quantization/base_config.py.
UNREAD = re.compile(
    r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)|\.([qkv]_(scale|zero_point)|kv_scale|g_idx)$"
)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on missing and unexpected tensors."""
    if not view.index.tensors:
        yield Finding.at(rules.NO_TENSORS, str(view.index.root))
        return
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused)
        if view.model.layout is None:
            yield from _missing_parts(view, fused)
        for layer in view.layers.members(fused):
            if (
                view.model.has_module(layer.name)
                and group is not None
                and quantized_parameters(layer.parameters)
            ):
                yield from _compare_parameters(view, group, layer)
    yield from _missing_draft_layers(view)
    layout = view.model.layout
    yield from _decoder_layers(view) if layout is None else _compare_with_layout(view, layout)


def tensors_not_judged(view: CheckpointView) -> Iterator[NotJudged]:
    """Yield the tensors that are not checked, with the reason."""
    layout = view.model.layout
    if layout is None:
        what = f"names and shapes of the tensors of {view.model.class_name or 'the model'}"
        why = "vexport does not know which tensors vLLM expects for this class and config"
        yield NotJudged(what=what, why=f"{why}, so it only compares layers with each other")
    elif layout.unknown:
        why = "vexport does not know which of these tensors vLLM expects for this config"
        yield NotJudged(what=first_and_more(sorted(layout.unknown)), why=why)


def _missing_draft_layers(view: CheckpointView) -> Iterator[Finding]:
    """Report missing layers for multi-token prediction (MTP) that the config declares.

    Only speculative decoding needs these layers. The finding is an error if the checkpoint will be
    served with MTP (`Target.speculative`), else a warning.
    """
    text = view.model.text
    counts = {key: value for key in DRAFTS if isinstance(value := text.get(key), int) and value}
    if not counts or any(map(view.model.is_draft, view.index.tensors)):
        return
    key, count = next(iter(counts.items()))
    needed = "mtp" in view.target.speculative
    rule = rules.NO_DRAFT_LAYERS if needed else rules.NO_DRAFT_LAYERS.as_warning
    yield Finding.at(rule, f"{view.config_path}: {key}", layers=count)


def _compare_with_layout(view: CheckpointView, layout: ModelLayout) -> Iterator[Finding]:
    unexpected, missing = list(_unexpected_tensors(view, layout)), _missing_tensors(view, layout)
    yield from _untied_head(view)
    for experts in sorted(
        {"".join(name.partition(EXPERTS)[:2]) for name in unexpected if EXPERTS in name}
    ):
        lost = [name for name in missing if name.startswith(experts)]
        names = [name for name in unexpected if name.startswith(experts)]
        if lost:
            yield Finding.at(
                rules.EXPERT_NAMES,
                min(names),
                unexpected=len(names),
                missing=len(lost),
                example=min(lost),
            )
            missing = {name: where for name, where in missing.items() if name not in lost}
            unexpected = [name for name in unexpected if name not in names]
    for name in unexpected:
        yield _unexpected_finding(view, layout, name)
    yield from _missing_findings(view, layout, missing)


def _missing_tensors(view: CheckpointView, layout: ModelLayout) -> dict[str, str]:
    """Map each missing tensor to the `where` of its finding: a linear layer, or the tensor."""
    names = view.index.tensors.keys()
    pairs = map(split_name, names)
    stored = {
        module for module, parameter in pairs if parameter not in AUXILIARY_PARAMETERS | {"bias"}
    }
    missing = {
        f"{module}.weight": joined_name(module, "blocks").removesuffix(".blocks")
        for module in layout.linears
        if module not in stored
    }
    missing |= {
        f"{module}.weight": f"{module}.weight" for module in layout.tables if module not in stored
    }
    missing |= {name: name for name in layout.parameters if name not in names}
    return {name: where for name, where in missing.items() if name not in layout.optional}


def _missing_findings(
    view: CheckpointView, layout: ModelLayout, missing: Mapping[str, str]
) -> Iterator[Finding]:
    stored_modules = {
        name[:at] for name in view.index.tensors for at, letter in enumerate(name) if letter == "."
    }
    parts: dict[str, list[str]] = {}
    for name in missing:
        # Modules around the tensor without any stored tensor, the outermost module first.
        missing_modules = (
            name[:at]
            for at, letter in enumerate(name)
            if letter == "." and name[:at] not in stored_modules
        )
        parts.setdefault(next(missing_modules, name), []).append(name)
    model = view.model.class_name
    for part, inside in sorted(parts.items()):
        if any(name.startswith(f"{part}.") for name in layout.unknown):
            continue  # vexport does not know whether the config uses this part of the model
        if len({name.rpartition(".")[0] for name in inside}) == 1:
            for name in inside:
                is_layer = name.removesuffix(".weight") in layout.linears
                kind = "layer" if is_layer else "tensor"
                yield Finding.at(rules.MISSING_TENSOR, missing[name], kind=kind, model=model)
        elif LAYER.search(part):
            layers = view.model.text.get("num_hidden_layers")
            yield Finding.at(rules.MISSING_DECODER_LAYER, part, layers=layers)
        else:
            yield Finding.at(rules.MISSING_PART, part, count=len(inside), model=model)


def _unexpected_tensors(view: CheckpointView, layout: ModelLayout) -> Iterator[str]:
    method = view.quantization.method
    own_scales = tuple(method.cache_scales.values()) if method else ()
    for name in sorted(view.index.tensors.keys() - layout.parameters.keys() - layout.optional):
        module, parameter = split_name(name)
        has_weight = module in layout.modules or module in layout.optional_modules
        weight = parameter in WEIGHTS and has_weight or UNREAD.search(name)
        matrix = module.endswith((INPUT, OUTPUT)) and view.quantization.is_transform(module)
        read = weight or matrix and module.rpartition(".")[0] in layout.modules
        is_known = read or view.model.is_draft(name) or name.endswith(own_scales)
        if not is_known and layout.is_complete_around(name):
            yield name


def _unexpected_finding(view: CheckpointView, layout: ModelLayout, name: str) -> Finding:
    model = view.model.class_name
    # vLLM drops every bias that it does not expect (AutoWeightsLoader, models/utils.py).
    if name.endswith(".bias"):
        return Finding.at(rules.IGNORED_BIAS, name, model=model)
    is_dropped = layout.place(name) in layout.drops
    rule = rules.IGNORED_TENSOR if is_dropped else rules.UNEXPECTED_TENSOR
    return Finding.at(rule, name, model=model)


def _untied_head(view: CheckpointView) -> Iterator[Finding]:
    """Report an output head that differs from the embeddings although the config ties them.

    transformers then uses the embeddings, but vLLM uses the head (maybe_untie_word_embeddings in
    config/model.py). In a multimodal model, the outermost config decides (with_hf_config in
    config/vllm.py).
    """
    tensors = view.index.tensors
    table = next((tensors[name] for name in TABLES if name in tensors), None)
    head = next((tensors[name] for name in HEADS if name in tensors), None)
    if view.index.config.get("tie_word_embeddings") is not True or head is None or table is None:
        return
    if not same_bytes(view.reader, head, view.reader, table):
        yield Finding.at(rules.UNTIED_HEAD, head.name)


def _compare_parameters(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> Iterator[Finding]:
    module, parameters, fused = layer.name, layer.parameters, layer.fused
    shape = view.layers.shape_of(layer)
    names = set(group.parameters(shape)) if shape is not None else {group.storage.weight}
    for parameter in sorted(names - parameters.keys()):
        where = joined_name(module, parameter)
        if parameter == "input_scale" and any(
            parameter in view.model.modules[other] for other in fused.members
        ):
            # vLLM uses the largest input scale of all members (create_fp8_input_scale).
            yield Finding.at(rules.SHARED_INPUT_SCALE, where, fused=fused.name)
        elif parameter == "weight_shape" or (
            parameter in group.storage.unread and group.weights.symmetric
        ):
            yield Finding.at(rules.UNREAD_TENSOR, where)
        else:
            yield Finding.at(rules.MISSING_PARAMETER, where, format=group.format)
    allowed = names | {"bias"} | group.storage.unread
    for parameter in sorted(parameters.keys() - allowed) if shape is not None else ():
        where = joined_name(module, parameter)
        yield Finding.at(rules.UNEXPECTED_PARAMETER, where, names=sorted(names))


def _missing_parts(view: CheckpointView, fused: FusedLayer) -> Iterator[Finding]:
    if fused.is_stored_fused or not view.layers.is_quantized(fused):
        return
    for module in part_names(fused.name, view.model.architecture):
        if module not in fused.members:
            yield Finding.at(
                rules.MISSING_FUSED_PART,
                module,
                others=len(fused.members),
                fused=fused.projection,
            )


def _decoder_layers(view: CheckpointView) -> Iterator[Finding]:
    numbers: dict[str, set[int]] = {}
    for name in view.index.tensors:
        prefix, mark, rest = name.partition(f".{LAYERS}.")
        number = rest.partition(".")[0]
        if mark and number.isdigit():
            numbers.setdefault(prefix + mark, set()).add(int(number))
    declared = view.model.text.get("num_hidden_layers")
    possible = not impossible_size(view.index.config, len(view.index.tensors))
    if isinstance(declared, int) and numbers and possible:
        prefix, layers = max(numbers.items(), key=lambda item: len(item[1]))
        for missing in sorted(set(range(declared)) - layers):
            yield Finding.at(rules.MISSING_DECODER_LAYER, f"{prefix}{missing}", layers=declared)
