"""Build the `ignore` list of a quantization config.

The list contains every part of a fused layer, and one pattern for all experts of a layer.
"""

import re
from collections.abc import Iterable, Iterator, Sequence, Set

from vexport.architectures import NUMBERED_LAYER
from vexport.architectures.fusion import (
    HEADS,
    FusedLayer,
    all_names,
    extra_lookup_entries,
    is_head,
    lookup_names,
    matches_any,
    patterns_below,
)
from vexport.architectures.linears import Names


def ignored(
    layers: Sequence[FusedLayer],
    kept: Set[str],
    opaque: Iterable[str],
    names: Names,
) -> tuple[str, ...]:
    """Return the entries that `ignore` needs.

    `layers` are all fused layers, `kept` the linear layers that stay unquantized, and `opaque` the
    tensors of experts that are copied unchanged. The entries follow these rules:

    - An entry without a pattern is the layer's name in the checkpoint. vLLM renames such entries
      like tensors (apply_vllm_mapper in compressed_tensors.py). It does not rename patterns, but
      compares them with vLLM's names. A pattern therefore only contains the end of a name, which is
      usually the same in the checkpoint and in vLLM (see `patterns_below`).
    - One pattern covers the routed experts of a layer, because vLLM looks up the first
      expert's projections.
    - Modules outside the decoder layers get a pattern that also matches longer names, because the
      inner model may rename them without renaming the entries of the quantization config
      (Gemma3nModel.hf_to_vllm_mapper).
    - If vLLM looks up the members of a fused module, the list contains all members, even members
      without a tensor (for example `v_proj` if the values are the keys). If vLLM looks up the fused
      module, the list also contains the module's name.
    - If no module of a layer that predicts further tokens is quantized, a single pattern matches
      all modules of the layer. If the layer has several names, there is a pattern for each name.
      Another vLLM class runs the layer, and may fuse and name its modules differently (Glm4MoeMTP,
      Step3p5MTP).
    - If vLLM looks up a module by a different name than the file has, the list also has this name.
    - No entry matches a quantized layer. Names take the place of a pattern that is too wide.
    """
    linears = [member for layer in layers for member in layer.members]
    stacks = {parent_of_layers(member) for member in linears if names.in_decoder(member)}
    quantized = _quantized_names(layers, kept, names)
    partly_quantized = {names.draft_layer(name) for name in quantized}
    patterns: dict[str, None] = {}
    for layer in layers:
        if not kept >= {*layer.members}:
            continue
        outside = _outside_pattern(layer.name, stacks)
        draft = names.draft_layer(layer.name)
        if draft is not None and draft not in partly_quantized:
            entries = tuple(
                pattern
                for name in names.drafter_names(draft)
                for pattern in patterns_below(name, r"\..*", names.architecture, quantized)
            )
        elif outside is not None and not matches_any(outside, quantized):
            entries = (f"re:{outside}",)
        else:
            entries = tuple(_entries(layer, names, quantized))
        entries = tuple(_without_quantized(entries, _names(layer, names), quantized))
        patterns.update(dict.fromkeys(entries))
        patterns.update(dict.fromkeys(extra_lookup_entries(layer, entries, names.architecture)))
    for tensor in opaque:
        entries = tuple(_experts_around(tensor, names, quantized))
        module = tensor.removesuffix(".weight")
        patterns.update(dict.fromkeys(_without_quantized(entries, (module,), quantized)))
    return tuple(patterns)


def _without_quantized(
    entries: Iterable[str], modules: Iterable[str], quantized: Sequence[str]
) -> Iterator[str]:
    """Yield the entries for `modules`, with their names if a pattern matches a quantized layer.

    vLLM would run this layer unquantized, and misread its tensors.
    """
    for entry in entries:
        pattern = entry.removeprefix("re:")
        if pattern != entry and matches_any(pattern, quantized):
            yield from modules
        else:
            yield entry


def _quantized_names(layers: Sequence[FusedLayer], kept: Set[str], names: Names) -> tuple[str, ...]:
    """Return all names of quantized layers, which `ignore` must not match."""
    quantized = (
        module
        for layer in layers
        if not kept >= {*layer.members}
        for module in (layer.name, *layer.members)
    )
    return all_names(quantized, names.architecture)


def ignored_head(linears: Iterable[str]) -> tuple[str, ...]:
    """Return an entry for an output head that is tied to the embeddings and not stored.

    Without the entry, transformers would look for the head's scales.
    """
    return () if any(map(is_head, linears)) else (f"re:.*{HEADS[0]}",)


def _entries(layer: FusedLayer, names: Names, quantized: Sequence[str]) -> Iterator[str]:
    if layer.experts is not None:
        yield from patterns_below(layer.experts, r"\..*", names.architecture, quantized)
        return
    yield from _names(layer, names)


def _names(layer: FusedLayer, names: Names) -> tuple[str, ...]:
    """Return the names by which vLLM looks up a layer."""
    members = tuple(lookup_names(layer, names.architecture))
    is_fused = len(layer.members) > 1 and layer.projection not in names.architecture.resolved
    return (*members, layer.name) if is_fused else members


def parent_of_layers(module: str) -> str:
    """Return the name of the module around the list of decoder layers, followed by a dot."""
    stack = NUMBERED_LAYER.search(module)
    return module[: stack.start() + 1] if stack and stack.start() else ""


def _outside_pattern(module: str, stacks: Set[str]) -> str | None:
    """Return a pattern for a module that shares a parent with the list of decoder layers.

    For `model.layers`, this is any module below `model` that is not part of a numbered layer.
    Returns None for all other modules.
    """
    if NUMBERED_LAYER.search(module):
        return None
    holders = (before for before in stacks if before.strip(".") and module.startswith(before))
    return next((rf".*\.{re.escape(module[len(before) :])}$" for before in holders), None)


def _experts_around(tensor: str, names: Names, quantized: Sequence[str]) -> Iterator[str]:
    stack = NUMBERED_LAYER.search(tensor)
    layer = tensor[: stack.end() - 1] if stack else ""
    return patterns_below(layer, r"\..*\bexperts\..*", names.architecture, quantized)
