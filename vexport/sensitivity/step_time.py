"""What a choice of schemes takes a step of one sequence on a GPU, by the bound of `vexport recommend`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.formats.gpus import CARDS
from vexport.formats.schemes import KEEP
from vexport.plan import Settings, build_plan
from vexport.plan.bound import LOW, Rank
from vexport.plan.kv_tokens import kv_cache_of
from vexport.plan.rank_weights import group_parts, rank_weights
from vexport.plan.table import PROBE
from vexport.scenario import Auto, Rule
from vexport.sensitivity.layer_groups import LayerGroup
from vexport.types import DEFAULT_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step that makes one token, at the slow end of the bound's interval.

    `rest` is what no choice changes, `groups` that of each layer group in each scheme.
    """

    rest: float
    groups: Mapping[tuple[str, str], float]


def step_times(
    index: SourceIndex, layer_groups: Sequence[LayerGroup], auto: Auto, tp: int
) -> StepTimes | None:
    """The times of all options; None for a budget that is none of speed.

    InputError where headers do not tell the KV cache, which a step reads.
    """
    if auto.gpu is None:
        return None
    settings = Settings(ranks=(tp,)).lenient
    plan = build_plan(index, (Rule(match="Linear", scheme=PROBE),), settings)
    kv_cache = kv_cache_of(index, tp)
    if kv_cache is None:
        need, fix = "one that headers tell", "use a budget of bits, bytes, share or loss"
        raise InputError("auto.gpu", got="a KV cache of unknown size", need=need, fix=fix)
    weights = rank_weights(index, plan, tp)
    rank = Rank(card=CARDS[auto.gpu], weights=weights, kv_cache=kv_cache, context=DEFAULT_CONTEXT)
    choices = {
        (one.name, scheme): one.groups_in(scheme)
        for one in layer_groups
        for scheme in dict.fromkeys((KEEP, *one.allowed))
    }
    times = {
        (name, scheme): sum(
            rank.part_seconds(part, None if scheme == KEEP else scheme, 1, 1) / LOW for part in parts
        )
        for (name, scheme), parts in zip(choices, group_parts(index, choices.values(), tp), strict=True)
    }
    whole = rank.decode_seconds(None, 1) / LOW
    rest = whole - sum(times[one.name, KEEP] for one in layer_groups)
    return StepTimes(rest=rest, groups=times)
