"""Is every tensor there that vLLM would otherwise leave uninitialized, without a word?"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from vexport.checks.expected import expected_parameters, weight_name
from vexport.checks.subject import QUANTIZED_LEAVES, ConfigGroup, Subject, Unit, error, quantized_leaves
from vexport.types import Finding, Json, TensorInfo

NAME = "completeness"
DESCRIPTION = "no parameter is missing and none is left over, per layer, per fused part and per decoder layer"
LAYERS = "layers"
EXPERTS = ".experts."
# model.norm; final_layernorm (Jamba, Falcon-H1, Zamba2), embedding_norm (LFM2)
FINAL_NORM = re.compile(r"model\.(?:\w+_)?(?:layer)?norm\.weight$")


def run(subject: Subject) -> Iterator[Finding]:
    """Findings on missing and unexpected tensors."""
    for unit in subject.units:
        group = subject.group_of(unit)
        yield from _fused_parts(subject, unit)
        for module, leaves in unit.members.items():
            if group is not None and quantized_leaves(leaves):
                yield from _parameters(group, module, leaves)
    yield from _decoder_layers(subject)
    yield from _outside_layers(subject)


def _parameters(group: ConfigGroup, module: str, leaves: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    expected = expected_parameters(group, leaves)
    names = set(expected) if expected is not None else {weight_name(group)}
    for leaf in sorted(names - leaves.keys()):
        yield error(
            NAME,
            f"{module}.{leaf}",
            expected=f"the tensor ({group.format})",
            got="none: vLLM would read uninitialized memory",
            fix="export the checkpoint again",
        )
    known = names | {"bias"}
    for leaf in sorted(leaves.keys() - known) if expected is not None else ():
        yield error(
            NAME,
            f"{module}.{leaf}",
            expected=f"only {', '.join(sorted(names))}",
            got="a tensor that the layer's scheme does not have",
            fix="remove it or correct the config group",
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
    got = "none: vLLM would read uninitialized memory"
    return error(NAME, where, expected=expected, got=got, fix="export the checkpoint again")
