"""Is every tensor there that vLLM would otherwise leave uninitialized, silently?"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from vexport.architectures.fusion import moe_layer
from vexport.architectures.text_config import text_config
from vexport.checkpoint.reader import same_bytes
from vexport.checks.vllm.decoder import Layout, impossible_size
from vexport.checks.vllm.groups import INPUT, OUTPUT, ConfigGroup
from vexport.checks.vllm.layers import (
    QUANTIZED_PARAMETERS,
    WITH_OTHERS,
    FusedLinear,
    joined_name,
    quantized_parameters,
)
from vexport.checks.vllm.view import CheckpointView, error, warning
from vexport.layers.linears import PREDICTION, STACK, names_of
from vexport.types import Finding

NAME = "completeness"
WEIGHTS = QUANTIZED_PARAMETERS | WITH_OTHERS | {"weight"}
DESCRIPTION = "no parameter is missing and none is left over, per layer, per fused part and per decoder layer"
LAYERS = "layers"
# How configs count layers that draft (hf_config_override in vllm/config/speculative.py).
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
EXPERTS = ".experts."
# The table of tokens and the output head, of text models and within multimodal ones.
TABLES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
HEADS = tuple(
    f"{model}lm_head.{weight}" for model in ("", "language_model.") for weight in ("weight", "weight_packed")
)
# model.norm; final_layernorm (Jamba, Falcon-H1, Zamba2), embedding_norm (LFM2)
FINAL_NORM = re.compile(r"model\.(?:\w+_)?(?:layer)?norm\.weight$")
# Tensors that vLLM drops or takes for the KV cache, whatever the class: AutoWeightsLoader in models/utils.py,
# get_cache_scale_mapper and _ignore_unexpected_suffixes in quantization/base_config.py.
UNREAD = re.compile(
    r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)|\.([qkv]_(scale|zero_point)|kv_scale|g_idx)$"
)


def run(view: CheckpointView) -> Iterator[Finding]:
    """Findings on missing and unexpected tensors."""
    if not view.index.tensors:
        yield _missing(str(view.index.root), "the model's tensors")
        return
    for fused in view.fused_linears:
        group = view.group_of(fused)
        if view.layout is None:
            yield from _fused_parts(view, fused)
        for module, parameters in fused.members.items():
            if group is not None and quantized_parameters(parameters):
                yield from _parameters(view, fused, group, module)
    yield from _of_method(view)
    yield from _drafts(view)
    if view.layout is not None:
        yield from _of_layout(view, view.layout)
        return
    yield from _decoder_layers(view)
    yield from _outside_layers(view)


def unjudged(view: CheckpointView) -> Iterator[str]:
    """What of a checkpoint's tensors is not judged, and why: `WHAT: WHY`."""
    if view.layout is None:
        yield (
            f"names and shapes of the tensors of {view.class_name or 'the model'}: it is not known what vLLM "
            "builds of this class and config, so that only layers are compared with each other"
        )


def _drafts(view: CheckpointView) -> Iterator[Finding]:
    """Layers that predict further tokens, which the config announces: only drafting needs them."""
    text, names = text_config(view.index.config), names_of(view.index, view.architecture)
    announced = next((key for key in DRAFTS if isinstance(text.get(key), int) and text[key]), None)
    if announced is None or any(
        PREDICTION.search(tensor) or names.draft_layer(tensor) for tensor in view.index.tensors
    ):
        return
    asked = "mtp" in view.target.speculative
    yield (error if asked else warning)(
        NAME,
        f"{view.config_path}: {announced}",
        expected=f"the {text[announced]} layers that predict further tokens (MTP)",
        got="no tensor of them: vLLM answers without them, and refuses to draft with method mtp",
        fix="copy them from the source, or do not draft with them",
    )


def _of_method(view: CheckpointView) -> Iterator[Finding]:
    """Modules that another method stores in every decoder layer, of which none is there."""
    count = text_config(view.index.config).get("num_hidden_layers")
    if view.method is None or not isinstance(count, int):
        return
    if impossible_size(view.index.config, len(view.index.tensors)):
        return
    stored = {fused.name for fused in view.fused_linears if fused.is_quantized}
    names = (f"model.layers.{number}.{name}" for number in range(count) for name in view.method.modules)
    for name in names:
        if name not in stored:
            yield _missing(joined_name(name, "blocks"), f"the layer, quantized ({view.method.source})")


def _of_layout(view: CheckpointView, layout: Layout) -> Iterator[Finding]:
    """Modules and parameters that the class has and the checkpoint lacks, and the other way round."""
    names = view.index.tensors.keys()
    stored = {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
    modules = {**layout.linears, **layout.tables}
    for module in sorted(layout.linears.keys() - stored):
        yield _missing(module, f"the layer, of {view.class_name} as its config sizes it")
    for module in sorted(layout.tables.keys() - stored - layout.optional):
        yield _missing(f"{module}.weight", f"the tensor, of {view.class_name} as its config sizes it")
    for name in sorted(layout.parameters.keys() - names):
        yield _missing(name, f"the tensor, of {view.class_name} as its config sizes it")
    prefixes = {name.rpartition(".")[0] for name in layout.parameters} | modules.keys()
    yield from _untied_head(view)
    own_scales = tuple(view.method.cache_scales.values()) if view.method else ()
    for name in sorted(names - layout.parameters.keys()):
        module, _, parameter = name.rpartition(".")
        if UNREAD.search(name) or name.endswith(own_scales) or module in modules and parameter in WEIGHTS:
            continue
        if parameter == "weight" and _is_read_matrix(view, module, modules):
            continue
        if parameter == "bias":
            # vLLM drops every bias that it does not expect (AutoWeightsLoader, models/utils.py).
            expected = "no bias, or a config that announces it" if module in prefixes else "no such tensor"
            fix = "remove it if it is zero, else correct the config (attention_bias, mlp_bias)"
            yield _passed_over(name, expected, "a bias that vLLM drops silently", fix)
        elif module not in modules and moe_layer(module) is not None:
            # vLLM drops what its mapping of experts does not have (load_weights of models with experts).
            expected = "only experts and projections of the class, as many as config.json says"
            fix = "remove it, or correct its name or the number of experts"
            yield _passed_over(name, expected, "an unknown name, which vLLM drops silently", fix)
        else:
            yield error(
                NAME,
                name,
                expected=f"only tensors of {view.class_name}, as its config sizes it",
                got="a name for which vLLM has no parameter",
                fix="remove the tensor, or correct its name or the config",
            )


def _is_read_matrix(view: CheckpointView, module: str, modules: Iterable[str]) -> bool:
    """Whether a module is the online transform of a linear layer."""
    return (
        module.rpartition(".")[0] in modules
        and module.endswith((INPUT, OUTPUT))
        and view.is_transform(module)
    )


def _untied_head(view: CheckpointView) -> Iterator[Finding]:
    """A head next to a config that ties it to the embeddings: transformers takes these, vLLM the head
    (maybe_untie_word_embeddings in config/model.py).

    In a multimodal model the outermost config decides (with_hf_config in config/vllm.py).
    """
    tensors = view.index.tensors
    table = next((tensors[name] for name in TABLES if name in tensors), None)
    head = next((tensors[name] for name in HEADS if name in tensors), None)
    if view.index.config.get("tie_word_embeddings") is not True or head is None or table is None:
        return
    if not same_bytes(view.reader, head, view.reader, table):
        expected = "no head, or that of the embeddings, as config.json ties them"
        got = "a different head: vLLM would use it, transformers would not"
        fix = "set tie_word_embeddings to false, or remove the head"
        yield warning(NAME, head.name, expected=expected, got=got, fix=fix)


def _passed_over(where: str, expected: str, got: str, fix: str = "export the checkpoint again") -> Finding:
    """A tensor that is not there or not read, which changes no answer of vLLM."""
    return warning(NAME, where, expected=expected, got=got, fix=fix)


def _parameters(
    view: CheckpointView, fused: FusedLinear, group: ConfigGroup, module: str
) -> Iterator[Finding]:
    parameters = fused.members[module]
    shape = view.linear_shape(group, module, parameters)
    names = set(group.parameters(shape)) if shape is not None else {group.storage.weight}
    for parameter in sorted(names - parameters.keys()):
        where = joined_name(module, parameter)
        if parameter == "input_scale" and any(parameter in other for other in fused.members.values()):
            # vLLM takes the largest of all members (create_fp8_input_scale).
            expected = "an input scale for each layer that runs as one"
            yield _passed_over(where, expected, f"none: vLLM takes that of the others in {fused.name}")
        elif parameter == "weight_shape":
            expected = "the tensor, by which compressed-tensors unpacks the weight"
            yield _passed_over(where, expected, "none: transformers cannot load the layer; vLLM can")
        elif parameter in group.storage.unread and group.weights.symmetric:
            yield _passed_over(where, "the tensor, which other loaders read", "none: vLLM does not read it")
        else:
            yield _missing(where, f"the tensor ({group.format})")
    announced = names | {"bias"} | group.storage.unread
    for parameter in sorted(parameters.keys() - announced) if shape is not None else ():
        yield error(
            NAME,
            joined_name(module, parameter),
            expected=f"only {', '.join(sorted(names))}",
            got="a tensor that the layer's scheme does not have",
            fix="remove it or correct the config group",
        )


def _fused_parts(view: CheckpointView, fused: FusedLinear) -> Iterator[Finding]:
    prefix, dot, projection = fused.name.rpartition(".")
    for part in view.fused_modules.get(projection, ()):
        module = f"{prefix}{dot}{part}"
        stored_apart = fused.name not in fused.members
        missing = fused.is_quantized and stored_apart and module not in fused.members
        if missing and not _is_repeated(view, module):
            expected = f"the part of {projection} that vLLM loads with {len(fused.members)} others"
            fix = "export the checkpoint again"
            yield error(NAME, module, expected=expected, got="no tensor of it", fix=fix)


def _is_repeated(view: CheckpointView, module: str) -> bool:
    """Whether vLLM loads another part in the place of one that a layer does not have."""
    repeats, layer = view.architecture.repeated.get(module.rpartition(".")[2]), STACK.search(module)
    text = text_config(view.index.config)
    kinds = text.get("layer_types")
    if repeats is None or layer is None or repeats.key and not text.get(repeats.key):
        return False
    number = int(layer[1])
    return isinstance(kinds, list) and number < len(kinds) and kinds[number] == repeats.layer_type


def _decoder_layers(view: CheckpointView) -> Iterator[Finding]:
    """Every decoder layer has the tensors that all its siblings have; none is missing at the end."""
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in view.index.tensors:
        if view.is_transform(name.rpartition(".")[0]):
            continue
        prefix, mark, rest = name.partition(f".{LAYERS}.")
        number, dot, relative = rest.partition(".")
        if mark and dot and number.isdigit():
            stacks.setdefault(prefix + mark, {}).setdefault(int(number), set()).add(_parameter(relative))
    names = names_of(view.index, view.architecture)
    declared = text_config(view.index.config).get("num_hidden_layers")
    for prefix, layers in stacks.items():
        if isinstance(declared, int) and names.in_decoder(f"{prefix}0.mlp"):
            # Those behind the last decoder layer draft: the model runs without them.
            layers = {number: own for number, own in layers.items() if number < declared}
        yield from _siblings(view, prefix, layers)
    if (
        isinstance(declared, int)
        and stacks
        and not impossible_size(view.index.config, len(view.index.tensors))
    ):
        prefix, layers = max(stacks.items(), key=lambda item: len(item[1]))
        for missing in sorted(set(range(declared)) - layers.keys()):
            yield _missing(f"{prefix}{missing}", f"{declared} decoder layers (num_hidden_layers)")


def _parameter(name: str) -> str:
    """A tensor's name, for all of a quantized weight's tensors that of the weight: schemes may differ."""
    module, dot, parameter = name.rpartition(".")
    return f"{module}{dot}weight" if parameter in WEIGHTS else name


def _siblings(view: CheckpointView, prefix: str, layers: Mapping[int, set[str]]) -> Iterator[Finding]:
    counts = Counter(name for names in layers.values() for name in names)
    if len(layers) < 3:
        return
    common = {name for name, count in counts.items() if count == len(layers) - 1}
    for layer, names in sorted(layers.items()):
        own = {_block(name) for name in names if counts[name] == 1}
        for name in sorted(common - names):
            module = f"{prefix}{layer}.{name}".rpartition(".")[0]
            of_another_kind = _is_of_another_kind(name, names, common - names, own)
            if not of_another_kind and not _is_repeated(view, module):
                yield _missing(f"{prefix}{layer}.{name}", "the tensor that all other layers have")


def _is_of_another_kind(name: str, names: set[str], missing: set[str], own: set[str]) -> bool:
    """Whether a layer has something else in a tensor's place: full attention, an MLP without experts."""
    block = _block(name)
    if all(_block(other) != block for other in names):
        return bool(own)
    return block in own and any(_block(other) == block and EXPERTS in other for other in missing)


def _block(name: str) -> str:
    return name.partition(".")[0]


def _outside_layers(view: CheckpointView) -> Iterator[Finding]:
    """Embeddings, final norm and, unless tied, the output head: what every class in the table loads."""
    names = set(view.index.tensors)
    if not any(name.startswith("model.layers.") for name in names):
        return
    required = ["model.embed_tokens.weight"]
    if not any(FINAL_NORM.match(name) for name in names):
        required.append("model.norm.weight")
    tied = text_config(view.index.config).get(
        "tie_word_embeddings", view.index.config.get("tie_word_embeddings", False)
    )
    if not tied and not any(name.startswith("lm_head.") for name in names):
        required.append("lm_head.weight")
    for name in required:
        if name not in names:
            yield _missing(name, "the tensor")


def _missing(where: str, expected: str) -> Finding:
    got = "no such tensor: vLLM would read uninitialized memory"
    return error(NAME, where, expected=expected, got=got, fix="export the checkpoint again")
