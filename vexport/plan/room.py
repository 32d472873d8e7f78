"""What a rank holds by a plan, and what fits next to it on a GPU: from headers alone."""

from collections.abc import Iterator, Mapping, Sequence

from vexport.checkpoint.index import SourceIndex
from vexport.formats.gpus import Card
from vexport.formats.schemes import get_scheme
from vexport.plan.build import Settings, build_plan
from vexport.plan.kernels import kernels_on, served_on
from vexport.plan.kv_tokens import kv_cache_of
from vexport.plan.rank_weights import group_parts, rank_weights
from vexport.plan.table import PROBE
from vexport.scenario import Rule
from vexport.types import DEFAULT_CONTEXT, Plan, RankRoom
from vexport.version import PINNED


def rank_rooms(
    index: SourceIndex, plan: Plan, cards: Sequence[Card], sizes: Sequence[int]
) -> Iterator[RankRoom]:
    """For each GPU and tensor parallel size."""
    for tp in sizes if cards else ():
        held, source = weights_held(index, plan, tp)
        cache = kv_cache_of(index, tp)
        for card in cards:
            plain = cache.held_bytes(DEFAULT_CONTEXT, card.step_tokens) if cache else None
            sequence = plain // 2 if plain and plan.kv_cache else plain
            yield RankRoom(
                gpu=card.name,
                tp=tp,
                weight_bytes=held,
                source_weight_bytes=source,
                kv_tokens=_tokens(card, held, sequence),
                source_kv_tokens=_tokens(card, source, plain),
                kernels=_kernels(index, plan, card, tp),
            )


def _kernels(index: SourceIndex, plan: Plan, card: Card, tp: int) -> Mapping[str, tuple[str, ...]]:
    if not card.sm:
        return {}
    groups = ((group, get_scheme(group.scheme)) for group in plan.groups)
    found = kernels_on(groups, served_on(index, card.sm, tp, PINNED))
    return {str(use): kinds for use, kinds in found.items()}


def weights_held(index: SourceIndex, plan: Plan, tp: int) -> tuple[int, int]:
    """Bytes of a rank's weights by the plan, and of the source's."""
    probe = build_plan(index, (Rule(match="Linear", scheme=PROBE),), Settings(ranks=(tp,)).lenient)
    source = rank_weights(index, probe, tp).num_bytes(None)
    groups = {name: [group for group in plan.groups if group.scheme == name] for name in plan.schemes}
    saved = sum(
        part.num_bytes(None) - part.num_bytes(scheme)
        for scheme, parts in zip(groups, group_parts(index, groups.values(), tp), strict=True)
        for part in parts
    )
    return source - saved, source


def _tokens(card: Card, weight_bytes: int, sequence: int | None) -> int | None:
    if not sequence:
        return None
    return max(0, card.usable_bytes - weight_bytes) * DEFAULT_CONTEXT // sequence
