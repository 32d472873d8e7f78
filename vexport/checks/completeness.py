"""Is every tensor there that vLLM would otherwise leave uninitialized, silently?"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from vexport.architectures.fusion import moe_layer
from vexport.checkpoint.reader import same_bytes
from vexport.checks.config import ORDERED_UNTIL, REFUSED_ORDERING
from vexport.checks.vllm.arguments import ConfigGroup
from vexport.checks.vllm.decoder import Layout
from vexport.checks.vllm.expected import parameters_of, weight_name
from vexport.checks.vllm.online import INPUT, OUTPUT
from vexport.checks.vllm.subject import QUANTIZED_LEAVES, Subject, Unit, error, quantized_leaves, warning
from vexport.types import Finding, Json

NAME = "completeness"
DESCRIPTION = "no parameter is missing and none is left over, per layer, per fused part and per decoder layer"
LAYERS = "layers"
EXPERTS = ".experts."
# model.norm; final_layernorm (Jamba, Falcon-H1, Zamba2), embedding_norm (LFM2)
FINAL_NORM = re.compile(r"model\.(?:\w+_)?(?:layer)?norm\.weight$")
# Tensors that vLLM drops or takes for the KV cache, whatever the class: AutoWeightsLoader in models/utils.py,
# get_cache_scale_mapper and _ignore_unexpected_suffixes in quantization/base_config.py.
UNREAD = re.compile(
    r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)|\.([qkv]_(scale|zero_point)|kv_scale|g_idx)$"
)


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on missing and unexpected tensors."""
    if not subject.index.tensors:
        yield _missing(str(subject.index.root), "the model's tensors")
        return
    for unit in subject.units:
        group = subject.group_of(unit)
        if subject.layout is None:
            yield from _fused_parts(subject, unit)
        for module, leaves in unit.members.items():
            if group is not None and quantized_leaves(leaves):
                yield from _parameters(subject, unit, group, module)
    if subject.layout is not None:
        yield from _of_layout(subject, subject.layout)
        return
    yield from _decoder_layers(subject)
    yield from _outside_layers(subject)


def _of_layout(subject: Subject, layout: Layout) -> Iterator[Finding]:
    """Modules and parameters that the class has and the checkpoint lacks, and the other way round."""
    names = subject.index.tensors.keys()
    stored = {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
    modules = {**layout.linears, **layout.tables}
    for module in sorted(layout.linears.keys() - stored):
        yield _missing(module, f"the layer, of {subject.class_name} as its config sizes it")
    for module in sorted(layout.tables.keys() - stored - layout.optional):
        yield _missing(f"{module}.weight", f"the tensor, of {subject.class_name} as its config sizes it")
    for name in sorted(layout.parameters.keys() - names):
        yield _missing(name, f"the tensor, of {subject.class_name} as its config sizes it")
    known = {name.rpartition(".")[0] for name in layout.parameters} | modules.keys()
    yield from _head_beside_tie(subject)
    for name in sorted(names - layout.parameters.keys()):
        module, _, leaf = name.rpartition(".")
        if UNREAD.search(name) or module in modules and leaf in (*QUANTIZED_LEAVES, "weight"):
            continue
        if leaf == "weight" and _is_read_matrix(subject, module, modules):
            continue
        if leaf == "bias":
            yield _unread_bias(name, of_module=module in known)
        elif module not in modules and moe_layer(module) is not None:
            yield _unread_expert(name)
        else:
            yield error(
                NAME,
                name,
                expected=f"only tensors of {subject.class_name}, as its config sizes it",
                got="a name for which vLLM has no parameter",
                fix="remove the tensor, or correct its name or the config",
            )


def _is_read_matrix(subject: Subject, module: str, modules: Iterable[str]) -> bool:
    """Whether a module is the online transform of a linear layer."""
    return (
        module.rpartition(".")[0] in modules
        and module.endswith((INPUT, OUTPUT))
        and subject.is_transform(module)
    )


def _head_beside_tie(subject: Subject) -> Iterator[Finding]:
    """vLLM takes the head that is stored, transformers the embeddings (try_verify_and_update_config)."""
    tensors = subject.index.tensors
    head, table = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if subject.index.config.get("tie_word_embeddings") is not True or head is None or table is None:
        return
    if not same_bytes(subject.reader, head, subject.reader, table):
        yield warning(
            NAME,
            head.name,
            expected="no head, or that of the embeddings, as config.json ties them",
            got="a different head: vLLM would use it, transformers would not",
            fix="set tie_word_embeddings to false, or remove the head",
        )


def _unread_bias(name: str, *, of_module: bool) -> Finding:
    """vLLM drops every bias that it does not expect (AutoWeightsLoader, models/utils.py)."""
    return warning(
        NAME,
        name,
        expected="no bias, or a config that announces it" if of_module else "no such tensor",
        got="a bias that vLLM drops silently",
        fix="remove it if it is zero, else correct the config (attention_bias, mlp_bias)",
    )


def _unread_expert(name: str) -> Finding:
    """vLLM drops what its mapping of experts does not have (load_weights of the models with experts)."""
    return warning(
        NAME,
        name,
        expected="only experts and projections of the class, as many as config.json says",
        got="an unknown name, which vLLM drops silently",
        fix="remove it, or correct its name or the number of experts",
    )


def _parameters(subject: Subject, unit: Unit, group: ConfigGroup, module: str) -> Iterator[Finding]:
    leaves = unit.members[module]
    sides = subject.sides(group, module, leaves)
    names = set(parameters_of(group, *sides)) if sides is not None else {weight_name(group)}
    if group.weights.actorder in REFUSED_ORDERING and subject.target.vllm < ORDERED_UNTIL:
        names.add("weight_g_idx")
    for leaf in sorted(names - leaves.keys()):
        if leaf == "input_scale" and any(leaf in other for other in unit.members.values()):
            yield _covered(f"{module}.{leaf}", unit)
        elif leaf == "weight_shape":
            yield _unread_shape(f"{module}.{leaf}")
        else:
            yield error(
                NAME,
                f"{module}.{leaf}",
                expected=f"the tensor ({group.format})",
                got="no such tensor: vLLM would read uninitialized memory",
                fix="export the checkpoint again",
            )
    known = names | {"bias"}
    for leaf in sorted(leaves.keys() - known) if sides is not None else ():
        yield error(
            NAME,
            f"{module}.{leaf}",
            expected=f"only {', '.join(sorted(names))}",
            got="a tensor that the layer's scheme does not have",
            fix="remove it or correct the config group",
        )


def _covered(where: str, unit: Unit) -> Finding:
    """vLLM starts from the lowest number and takes the largest of all members (create_fp8_input_scale)."""
    return warning(
        NAME,
        where,
        expected="an input scale for each layer that runs as one",
        got=f"no such tensor: vLLM would take that of the others in {unit.name}",
        fix="export the checkpoint again",
    )


def _unread_shape(where: str) -> Finding:
    """No scheme of vLLM reads what it loads into `weight_shape`."""
    return warning(
        NAME,
        where,
        expected="the tensor, by which compressed-tensors unpacks the weight",
        got="no such tensor: transformers cannot load the layer; vLLM does not read it",
        fix="export the checkpoint again",
    )


def _fused_parts(subject: Subject, unit: Unit) -> Iterator[Finding]:
    prefix, dot, leaf = unit.name.rpartition(".")
    for part in subject.fused.get(leaf, ()):
        module = f"{prefix}{dot}{part}"
        stored_apart = unit.name not in unit.members
        if unit.is_quantized and stored_apart and module not in unit.members:
            yield error(
                NAME,
                module,
                expected=f"the part of {leaf} that vLLM loads with {len(unit.members)} others",
                got="no tensor of it",
                fix="export the checkpoint again",
            )


def _decoder_layers(subject: Subject) -> Iterator[Finding]:
    """Every decoder layer has the tensors that all its siblings have; none is missing at the end."""
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in subject.index.tensors:
        if subject.is_transform(name.rpartition(".")[0]):
            continue
        prefix, mark, rest = name.partition(f".{LAYERS}.")
        number, dot, relative = rest.partition(".")
        if mark and dot and number.isdigit():
            stacks.setdefault(prefix + mark, {}).setdefault(int(number), set()).add(_parameter(relative))
    for prefix, layers in stacks.items():
        yield from _siblings(prefix, layers)
    declared = _text_config(subject).get("num_hidden_layers")
    if isinstance(declared, int) and stacks:
        prefix, layers = max(stacks.items(), key=lambda item: len(item[1]))
        for missing in sorted(set(range(declared)) - layers.keys()):
            yield _missing(f"{prefix}{missing}", f"{declared} decoder layers (num_hidden_layers)")


def _parameter(name: str) -> str:
    """A tensor's name, for all of a quantized weight's tensors that of the weight: schemes may differ."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}weight" if leaf in QUANTIZED_LEAVES else name


def _siblings(prefix: str, layers: Mapping[int, set[str]]) -> Iterator[Finding]:
    counts = Counter(name for names in layers.values() for name in names)
    if len(layers) < 3:
        return
    common = {name for name, count in counts.items() if count == len(layers) - 1}
    for layer, names in sorted(layers.items()):
        own = {_block(name) for name in names if counts[name] == 1}
        for name in sorted(common - names):
            if not _is_of_another_kind(name, names, common - names, own):
                yield _missing(f"{prefix}{layer}.{name}", "the tensor that all other layers have")


def _is_of_another_kind(name: str, names: set[str], missing: set[str], own: set[str]) -> bool:
    """Whether a layer has something else in a tensor's place: full attention, an MLP without experts."""
    block = _block(name)
    if all(_block(other) != block for other in names):
        return bool(own)
    return block in own and any(_block(other) == block and EXPERTS in other for other in missing)


def _block(name: str) -> str:
    return name.partition(".")[0]


def _outside_layers(subject: Subject) -> Iterator[Finding]:
    """Embeddings, final norm and, unless tied, the output head: what every class in the table loads."""
    names = set(subject.index.tensors)
    if not any(name.startswith("model.layers.") for name in names):
        return
    required = ["model.embed_tokens.weight"]
    if not any(FINAL_NORM.match(name) for name in names):
        required.append("model.norm.weight")
    tied = _text_config(subject).get(
        "tie_word_embeddings", subject.index.config.get("tie_word_embeddings", False)
    )
    if not tied and not any(name.startswith("lm_head.") for name in names):
        required.append("lm_head.weight")
    for name in required:
        if name not in names:
            yield _missing(name, "the tensor")


def _text_config(subject: Subject) -> Mapping[str, Json]:
    nested = subject.index.config.get("text_config")
    return nested if isinstance(nested, dict) else subject.index.config


def _missing(where: str, expected: str) -> Finding:
    got = "no such tensor: vLLM would read uninitialized memory"
    return error(NAME, where, expected=expected, got=got, fix="export the checkpoint again")
