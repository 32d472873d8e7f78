"""The `ignore` list of a plan's output, complete for what vLLM fuses and short for experts."""

import re
from collections.abc import Iterable, Iterator, Sequence, Set

from vexport.architectures import STACK
from vexport.architectures.fusion import (
    HEADS,
    FusedLayer,
    all_names,
    also_asked,
    below,
    is_head,
    looked_up,
    matches_any,
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
    tensors of experts that are copied as they are.

    - Names of checkpoints: vLLM renames them as it renames tensors (apply_vllm_mapper in
      compressed_tensors.py); a pattern is matched with vLLM's own name, so it starts where both
      agree, or
      further to the left where it would match a quantized layer of another stack (`mtp.layers.0`).
    - Routed experts are looked up by the first expert's projections: one pattern a layer covers
    them.
    - What lies outside the decoder layers may lie deeper in vLLM, by renames of the inner model
    that the
      quantization config does not see (Gemma3nModel.hf_to_vllm_mapper): a pattern finds it there
      too.
    - A fused module that vLLM's quantization config does not take apart is named itself as well; of
    one that
      it does, all parts are named, also those that no tensor has (values that are the keys).
    - A layer that predicts further tokens, run by another class that may take no fused module apart
    and name
      it otherwise (Glm4MoeMTP, Step3p5MTP), is kept by one pattern for each of its names.
    - What vLLM asks for by another name than the file has is named by that, too.
    """
    linears = [member for layer in layers for member in layer.members]
    stacks = {_before_layers(member) for member in linears if names.in_decoder(member)}
    quantized = _quantized_names(layers, kept, names)
    partly = {names.draft_layer(name) for name in quantized}
    patterns: dict[str, None] = {}
    for layer in layers:
        if not kept >= {*layer.members}:
            continue
        outside = _outside(layer.name, stacks)
        draft = names.draft_layer(layer.name)
        if draft is not None and draft not in partly:
            copied = tuple(
                pattern
                for name in names.drafter_names(draft)
                for pattern in below(name, r"\..*", names.architecture, quantized)
            )
        elif outside is not None and not matches_any(outside, quantized):
            copied = (f"re:{outside}",)
        else:
            copied = tuple(_patterns(layer, names, quantized))
        patterns.update(dict.fromkeys(copied))
        patterns.update(dict.fromkeys(also_asked(layer, copied, names.architecture)))
    for tensor in opaque:
        patterns.update(dict.fromkeys(_unknown(tensor, names, quantized)))
    return tuple(patterns)


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
    """The names of the head that a checkpoint does not store, it being the embeddings:
    transformers, for which it is a linear layer, would look for its scales."""
    return () if any(map(is_head, linears)) else (f"re:.*{HEADS[0]}",)


def _patterns(layer: FusedLayer, names: Names, quantized: Sequence[str]) -> Iterator[str]:
    """Yield entries for a layer that is kept: its names, or one pattern for all routed experts."""
    if layer.experts is not None:
        yield from below(layer.experts, r"\..*", names.architecture, quantized)
        return
    yield from looked_up(layer, names.architecture)
    if len(layer.members) > 1 and layer.projection not in names.architecture.resolved:
        yield layer.name


def _before_layers(module: str) -> str:
    """The name of what holds the list of decoder layers, with the dot behind it."""
    stack = STACK.search(module)
    return module[: stack.start() + 1] if stack else ""


def _outside(module: str, stacks: Set[str]) -> str | None:
    """A pattern for what lies outside the decoder layers, None for other modules."""
    if STACK.search(module):
        return None
    holders = (before for before in stacks if before.strip(".") and module.startswith(before))
    return next((rf".*\.{re.escape(module[len(before) :])}$" for before in holders), None)


def _unknown(tensor: str, names: Names, quantized: Sequence[str]) -> Iterator[str]:
    """Patterns for vLLM's routed experts of the layer that a tensor belongs to."""
    stack = STACK.search(tensor)
    layer = tensor[: stack.end() - 1] if stack else ""
    return below(layer, r"\..*\bexperts\..*", names.architecture, quantized)
