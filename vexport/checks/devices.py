"""Check whether a checkpoint runs as stored on the target's ranks and GPUs.

The options `--tp` and `--sm` select these checks. `vexport plan` uses the same rules for the shapes
of each rank's part of a layer. The kernels that vLLM selects are not checked here: `load --dry`
shows them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from vexport.architectures import with_stars
from vexport.architectures.config import head_width
from vexport.architectures.fusion import FusedLayer
from vexport.architectures.ranks import heads_of
from vexport.architectures.versions import VersionFacts
from vexport.checks.faults import rounded_layers
from vexport.checks.kv_cache import cache_scales
from vexport.checks.vllm.groups import ConfigGroup
from vexport.checks.vllm.precision import layer_kinds, other_precision
from vexport.checks.vllm.view import CheckpointView
from vexport.formats import PACKED
from vexport.formats.arguments import input_bits, precision
from vexport.formats.gpus import GENERATIONS
from vexport.formats.schemes import Scheme
from vexport.formats.shapes import unsupported_on
from vexport.records import Finding
from vexport.rules import devices as rules
from vexport.words import plural

DESCRIPTION = (
    "heads, groups and blocks divide over the ranks (--tp), and GPUs run schemes as stored (--sm)"
)
# Lowest SM on which Triton's attention supports FP8 caches.
TRITON_FP8_FROM = 89
# Lowest SM and head sizes that FlashInfer supports.
FLASHINFER_FROM, FLASHINFER_HEADS = 80, (64, 128, 256, 512)
NUMBER = re.compile(r"\d+")
# Ending of tensors with attention sinks.
SINKS = ".sinks"


def run(view: CheckpointView) -> Iterator[Finding]:
    """Yield findings on the ranks and compute capabilities in the target."""
    if view.model.architecture.row_parallel:
        yield from _heads(view)
        yield from _shapes(view)
    for group, fused_layers in _by_group(view):
        yield from _capabilities(view, group, fused_layers)
    yield from _cache(view)


def _cache(view: CheckpointView) -> Iterator[Finding]:
    """Report GPUs on which no attention backend supports an FP8 KV cache.

    On older GPUs Triton's attention refuses an FP8 cache, but FlashInfer may support it. Latent
    attention (MLA) uses other backends, which are not checked.

    Sources: _get_backend_priorities in vllm/platforms/cuda.py; TritonAttentionImpl.__init__, and
    supports_compute_capability, get_supported_head_sizes and supports_sink of FlashInferBackend in
    vllm/v1/attention/backends.
    """
    text = view.model.text
    method = view.quantization.method
    needs_request = method is not None and method.needs_cache_request
    if "kv_lora_rank" in text or needs_request or next(cache_scales(view), None) is None:
        return
    width = head_width(text)
    sinks = any(name.endswith(SINKS) for name in view.index.tensors)
    flashinfer_runs = width in FLASHINFER_HEADS and not sinks
    lowest = FLASHINFER_FROM if flashinfer_runs else TRITON_FP8_FROM
    refusing = [sm for sm in view.target.sm if sm < lowest]
    if refusing:
        where = f"the FP8 KV cache (sm {_listed(refusing)})"
        reason = "attention sinks" if sinks else f"head size {width}"
        least, with_flashinfer = TRITON_FP8_FROM, FLASHINFER_FROM
        if flashinfer_runs:
            yield Finding.at(
                rules.CACHE_WITH_FLASHINFER,
                where,
                sm=refusing,
                reason=reason,
                least=least,
                with_flashinfer=with_flashinfer,
            )
        else:
            yield Finding.at(rules.CACHE, where, sm=refusing, reason=reason, least=least)


def _heads(view: CheckpointView) -> Iterator[Finding]:
    heads = heads_of(view.layers.by_name, view.model.names)
    ranks_of: dict[str, list[int]] = {}
    for ranks in view.target.tp:
        if got := heads.uneven(ranks):
            ranks_of.setdefault(got, []).append(ranks)
    for got, all_ranks in ranks_of.items():
        yield Finding.at(
            rules.HEADS,
            f"{view.config_path} (tp {_listed(all_ranks)})",
            tp=all_ranks,
            reason=got,
            ranks=all_ranks,
            possible=heads.possible_gpus,
        )


def _shapes(view: CheckpointView) -> Iterator[Finding]:
    """Report layers that vLLM cannot run on these numbers of ranks, one finding for each kind.

    On other numbers of ranks, the sizes in the reason differ. A kind of layer that vLLM cannot run
    for the same reason is reported once, with the sizes on the fewest ranks.
    """
    found: dict[tuple[str, str], tuple[str, Counter[int]]] = {}
    for ranks in sorted(view.target.tp):
        for kind, reason in _unsupported_layers(view, ranks):
            key = kind, NUMBER.sub("#", reason)
            found.setdefault(key, (reason, Counter()))[1][ranks] += 1
    for (kind, _), (reason, counts) in found.items():
        all_ranks, layers = list(counts), plural(max(counts.values()), "layer")
        where = f"{kind} ({layers}, tp {_listed(all_ranks)})"
        if 1 in counts:
            yield Finding.at(rules.LAYER, where, tp=all_ranks, reason=reason)
        else:
            yield Finding.at(
                rules.LAYER_ON_RANKS, where, tp=all_ranks, reason=reason, ranks=all_ranks
            )


def _unsupported_layers(view: CheckpointView, ranks: int) -> Iterator[tuple[str, str]]:
    for fused in view.model.fused_layers:
        group = view.lookup.group_of(fused) if view.layers.is_quantized(fused) else None
        members = view.layers.members_with_sizes(fused, group)
        if members is None:
            continue
        places = {view.model.names.place(name) for name in fused.members}
        if group is None and places != {"decoder"}:
            continue
        scheme = Scheme(name=group.name, args=group.args, format=group.storage) if group else None
        if reason := unsupported_on(fused, members, scheme, view.model.names, ranks):
            yield with_stars(fused.name), reason


def _by_group(view: CheckpointView) -> list[tuple[ConfigGroup, list[FusedLayer]]]:
    by_group: dict[str, tuple[ConfigGroup, list[FusedLayer]]] = {}
    for fused in view.model.fused_layers if view.target.sm else ():
        group = view.lookup.group_of(fused)
        if group is not None and view.layers.is_quantized(fused):
            by_group.setdefault(group.name, (group, []))[1].append(fused)
    return list(by_group.values())


def _capabilities(
    view: CheckpointView, group: ConfigGroup, fused_layers: list[FusedLayer]
) -> Iterator[Finding]:
    support, capabilities = group.storage.gpu_support(group), view.target.sm
    refuses = partial(refuses_scheme, view.model.facts, group)
    count = plural(len(fused_layers), "layer")
    layers = f"{with_stars(fused_layers[0].name)} and all of {group.name} ({count}"
    refusing = [sm for sm in capabilities if refuses(sm)]
    if refusing:
        running = [sm for sm in sorted(GENERATIONS) if not refuses(sm)]
        where = f"{layers}, sm {_listed(refusing)})"
        gpus, stored = _needed(running), precision(group)
        if support.after_loading:
            yield Finding.at(
                rules.KERNEL,
                where,
                sm=refusing,
                reason=support.after_loading,
                gpus=gpus,
                precision=stored,
                format=group.format,
                packed=PACKED.name,
            )
        else:
            yield Finding.at(
                rules.SCHEME,
                where,
                sm=refusing,
                gpus=gpus,
                precision=stored,
                format=group.format,
            )
    names = dict.fromkeys(with_stars(fused.name) for fused in fused_layers)
    reported = rounded_layers(view, group)
    alike: dict[tuple[int, str], list[int]] = {}
    for sm in capabilities:
        kinds = layer_kinds(name for name in names if (name, sm) not in reported)
        if sm not in refusing and kinds and support.bits(sm) != input_bits(group):
            alike.setdefault((support.bits(sm), kinds), []).append(sm)
    for (bits, kinds), alike_capabilities in alike.items():
        yield other_precision(
            f"{kinds} (sm {_listed(alike_capabilities)})",
            stored=precision(group),
            runs=f"W{group.weights.num_bits}A{bits}",
            capabilities=alike_capabilities,
        )


def refuses_scheme(facts: VersionFacts, group: ConfigGroup, sm: int) -> bool:
    """Return True if a version of vLLM refuses a scheme on a GPU.

    vLLM refuses it if it selects no class for the layers, or if the class has no kernel. The class
    is recorded for each version, with the classes that vLLM falls back to on older GPUs.
    """
    support = group.storage.gpu_support(group)
    selected = facts.selected_class(group.storage.vllm_scheme(group), sm)
    if selected is None:
        return support.refuses(sm)
    return not selected or support.lacks_kernel(sm)


def _needed(running: Sequence[int]) -> str:
    if not running:
        return "a CPU"
    first, last = running[0], running[-1]
    if last == max(GENERATIONS):
        return f"SM {first} or above"
    return f"SM {first}" if first == last else f"SM {first} to {last}"


def _listed(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))
