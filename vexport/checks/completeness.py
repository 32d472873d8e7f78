"""Check that no tensor is missing or unexpected.

vLLM silently leaves the parameters of missing tensors uninitialized.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

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
from vexport.checks.vllm.findings import error, warning
from vexport.checks.vllm.groups import INPUT, OUTPUT, ConfigGroup, StoredLayer
from vexport.checks.vllm.view import CheckpointView
from vexport.records import Finding, LoaderFault, NotJudged
from vexport.records.values import plural

NAME = "completeness"
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

# vLLM refuses unknown names, and finds parameters without a stored value.
FAULTS: Sequence[LoaderFault] = ("refused", "missing")


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on missing and unexpected tensors."""
    if not view.index.tensors:
        yield _missing_finding(str(view.index.root), "the model's tensors")
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
        first, *more = sorted(layout.unknown)
        what = f"{first} and {len(more)} more" if more else first
        why = "vexport does not know which of these tensors vLLM expects for this config"
        yield NotJudged(what=what, why=why)


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
    finding = error if "mtp" in view.target.speculative else warning
    layers = plural(count, "layer")
    expected = f"the tensors of {layers} for multi-token prediction (MTP)"
    got = "no such tensor: vLLM generates text without these layers, but cannot draft with mtp"
    fix = "copy the layers from the source, or serve the model without MTP drafts"
    yield finding(
        NAME, f"{view.config_path}: {key}", claim="refused", expected=expected, got=got, fix=fix
    )


def _compare_with_layout(view: CheckpointView, layout: ModelLayout) -> Iterator[Finding]:
    """Report missing tensors of the model class, and tensors that the class does not have."""
    unexpected, missing = list(_unexpected_tensors(view, layout)), _missing_tensors(view, layout)
    yield from _untied_head(view)
    for experts in sorted(
        {"".join(name.partition(EXPERTS)[:2]) for name in unexpected if EXPERTS in name}
    ):
        lost = [name for name in missing if name.startswith(experts)]
        names = [name for name in unexpected if name.startswith(experts)]
        if lost:
            expected = f"experts under names that vLLM loads, such as {min(lost)}"
            got = (
                f"{plural(len(names), 'tensor')} under other names, which vLLM ignores, and "
                f"{plural(len(lost), 'missing tensor')}"
            )
            fix = "export each expert as separate tensors"
            yield error(
                NAME,
                min(names),
                claim="values",
                expected=expected,
                got=got,
                fix=fix,
                loader_faults=FAULTS,
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
    """Yield findings on missing tensors.

    If a whole part of the model is missing, there is a single finding for the part.
    """
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
    sized = f"of {view.model.class_name}, with the sizes in config.json"
    for part, inside in sorted(parts.items()):
        if any(name.startswith(f"{part}.") for name in layout.unknown):
            continue  # vexport does not know whether the config uses this part of the model
        if len({name.rpartition(".")[0] for name in inside}) > 1:
            layers = view.model.text.get("num_hidden_layers")
            known = (
                f"; config.json sets {layers} decoder layers (num_hidden_layers)"
                if LAYER.search(part)
                else ""
            )
            yield _missing_finding(part, f"the {len(inside)} tensors of this part {sized}{known}")
        else:
            for name in inside:
                kind = "layer" if name.removesuffix(".weight") in layout.linears else "tensor"
                yield _missing_finding(missing[name], f"this {kind} {sized}")


def _unexpected_tensors(view: CheckpointView, layout: ModelLayout) -> Iterator[str]:
    """Yield the tensors that the model class does not have."""
    method = view.quantization.method
    own_scales = tuple(method.cache_scales.values()) if method else ()
    for name in sorted(view.index.tensors.keys() - layout.parameters.keys() - layout.optional):
        module, parameter = split_name(name)
        weight = parameter in WEIGHTS and module in layout.modules or UNREAD.search(name)
        matrix = module.endswith((INPUT, OUTPUT)) and view.quantization.is_transform(module)
        read = weight or matrix and module.rpartition(".")[0] in layout.modules
        is_known = read or view.model.is_draft(name) or name.endswith(own_scales)
        if not is_known and layout.is_complete_around(name):
            yield name


def _unexpected_finding(view: CheckpointView, layout: ModelLayout, name: str) -> Finding:
    """Return the finding on a tensor that has no parameter in vLLM."""
    expected = f"only tensors of {view.model.class_name}, with the sizes in config.json"
    fix = "remove the tensor, or correct its name or the config"
    if name.endswith(".bias"):
        # vLLM drops every bias that it does not expect (AutoWeightsLoader, models/utils.py).
        return _harmless_finding(
            name, expected, "a bias that vLLM silently ignores", f"{fix} (attention_bias)"
        )
    if layout.place(name) in layout.drops:
        return _harmless_finding(
            name, expected, "an unknown tensor that vLLM silently ignores", fix
        )
    return error(
        NAME,
        name,
        claim="refused",
        expected=expected,
        got="a tensor for which vLLM has no parameter",
        fix=fix,
        loader_faults=FAULTS,
    )


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
        expected = "no head, or a copy of the embeddings, because tie_word_embeddings is true"
        got = "a different head: vLLM would use it, transformers would use the embeddings"
        fix = "set tie_word_embeddings to false, or remove the head"
        yield warning(NAME, head.name, claim="values", expected=expected, got=got, fix=fix)


def _harmless_finding(
    where: str, expected: str, got: str, fix: str = "export the checkpoint again"
) -> Finding:
    """Return a warning about a missing or unread tensor that does not change vLLM's outputs."""
    return warning(NAME, where, claim=None, expected=expected, got=got, fix=fix)


def _compare_parameters(
    view: CheckpointView, group: ConfigGroup, layer: StoredLayer
) -> Iterator[Finding]:
    """Report missing and additional tensors of a quantized layer."""
    module, parameters, fused = layer.name, layer.parameters, layer.fused
    shape = view.layers.shape_of(layer)
    names = set(group.parameters(shape)) if shape is not None else {group.storage.weight}
    for parameter in sorted(names - parameters.keys()):
        where = joined_name(module, parameter)
        if parameter == "input_scale" and any(
            parameter in view.model.modules[other] for other in fused.members
        ):
            # vLLM uses the largest input scale of all members (create_fp8_input_scale).
            expected = f"an input scale for each layer of {fused.name}"
            yield _harmless_finding(
                where, expected, "no such tensor: vLLM uses the input scale of the other layers"
            )
        elif parameter == "weight_shape":
            expected = "the tensor, which compressed-tensors needs to unpack the weight"
            yield _harmless_finding(
                where, expected, "no such tensor: vLLM can load the layer, transformers cannot"
            )
        elif parameter in group.storage.unread and group.weights.symmetric:
            yield _harmless_finding(
                where,
                "the tensor, which other loaders read",
                "no such tensor: vLLM does not read it",
            )
        else:
            yield _missing_finding(
                where, f"this tensor, which is part of the format {group.format}"
            )
    allowed = names | {"bias"} | group.storage.unread
    for parameter in sorted(parameters.keys() - allowed) if shape is not None else ():
        where = joined_name(module, parameter)
        expected = f"only {', '.join(sorted(names))}"
        got = "a tensor that the layer's scheme does not have"
        config = "config group" if view.quantization.method is None else "config"
        fix = f"remove the tensor, or correct the {config}"
        yield error(
            NAME, where, claim="refused", expected=expected, got=got, fix=fix, loader_faults=FAULTS
        )


def _missing_parts(view: CheckpointView, fused: FusedLayer) -> Iterator[Finding]:
    """Report missing members of a quantized fused layer, such as a `v_proj` of `qkv_proj`."""
    if fused.is_stored_fused or not view.layers.is_quantized(fused):
        return
    for module in part_names(fused.name, view.model.architecture):
        if module not in fused.members:
            others = plural(len(fused.members), "other part")
            expected = f"this part of {fused.projection}, which vLLM fuses with {others}"
            fix = "export the checkpoint again"
            yield error(
                NAME,
                module,
                claim="values",
                expected=expected,
                got="no such layer",
                fix=fix,
                loader_faults=FAULTS,
            )


def _decoder_layers(view: CheckpointView) -> Iterator[Finding]:
    """Report missing decoder layers of a class that has no layout.

    The number of decoder layers is compared with `num_hidden_layers` in the config.
    """
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
            yield _missing_finding(
                f"{prefix}{missing}", f"{declared} decoder layers (num_hidden_layers)"
            )


def _missing_finding(where: str, expected: str) -> Finding:
    got = "no such tensor: vLLM would use uninitialized memory"
    return error(
        NAME,
        where,
        claim="values",
        expected=expected,
        got=got,
        fix="export the checkpoint again",
        loader_faults=FAULTS,
    )
