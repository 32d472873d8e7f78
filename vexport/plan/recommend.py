"""Every scheme for one model on one GPU, and which to start with: from headers and data sheets alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from vexport.architectures.versions import facts_of, nearest_version
from vexport.checkpoint.index import SourceIndex
from vexport.formats import PACKED
from vexport.formats.arguments import UNQUANTIZED_BITS
from vexport.formats.gpus import ROCM_EMULATED, ROCM_KINDS, Card, generation
from vexport.formats.schemes import Scheme, get_scheme, preset_of, regrouped, scheme_names
from vexport.plan.bound import Rank, crossover, speed_bound
from vexport.plan.build import Settings, build_plan
from vexport.plan.choose import choose
from vexport.plan.estimates import Samples, estimates
from vexport.plan.kernels import Served, kernels_on, served_on
from vexport.plan.kv_tokens import KvCacheOfRank, kv_cache_of
from vexport.plan.rank_weights import RankWeights, rank_weights
from vexport.plan.shapes import kind_of_group
from vexport.plan.table import PROBE, scheme_table
from vexport.scenario import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, Rule
from vexport.types import (
    DEFAULT_CONTEXT,
    Candidate,
    FusionGroup,
    Plan,
    Recommendation,
    Runs,
    SchemeOutlook,
    SchemeTable,
    observer_names,
)
from vexport.version import PINNED, Version, short_version

UNQUANTIZED = "unquantized"
# The schemes whose crossover is told.
SMALL, LARGE = "W4A16", "FP8_DYNAMIC"
SAMPLES = Samples(number=DEFAULT_SAMPLES, tokens=DEFAULT_SEQ_LEN)
# Weights of fewer bits are rounded by calibration text where there is any.
FULL_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model is to run on: `tp` cards, sequences of `context` tokens, a vLLM."""

    card: Card
    tp: int = 1
    context: int = DEFAULT_CONTEXT
    vllm: Version = PINNED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Seconds of quantizing, and of quantizing with weights rounded by text."""

    nearest: float = 0.0
    refit: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model on one rank; `plan` quantizes all that a rule for linear layers reaches."""

    index: SourceIndex
    plan: Plan
    target: Target
    weights: RankWeights
    kv_cache: KvCacheOfRank | None
    costs: dict[tuple[bool, bool, bool], _Cost] = field(default_factory=dict)

    @property
    def rank(self) -> Rank | None:
        """What the bound is computed for; None where the KV cache is not known."""
        if self.kv_cache is None:
            return None
        target = self.target
        return Rank(card=target.card, weights=self.weights, kv_cache=self.kv_cache, context=target.context)

    @property
    def sequence_bytes(self) -> int | None:
        """What vLLM keeps for the KV cache of one sequence on a rank."""
        target = self.target
        return self.kv_cache.held_bytes(target.context, target.card.step_tokens) if self.kv_cache else None

    def cost(self, scheme: Scheme) -> _Cost:
        """About how long quantizing takes, computed once for schemes that take the same."""
        rounded = scheme.args.weights.num_bits < FULL_BITS
        kind = (scheme.args.calibrated, "FP4" in scheme.name, rounded)
        if kind not in self.costs:
            refit = self._seconds(scheme.name, rounded=True) if rounded else None
            self.costs[kind] = _Cost(nearest=self._seconds(scheme.name, rounded=False), refit=refit)
        return self.costs[kind]

    def kernels(self, scheme: Scheme) -> tuple[str, ...]:
        """vLLM's kernels for all layers in a scheme, each once."""
        if self.served is None:
            return ()
        return tuple(map(str, kernels_on(((group, scheme) for group in self.kinds), self.served)))

    @cached_property
    def kinds(self) -> tuple[FusionGroup, ...]:
        """One group of each kind."""
        return tuple({kind_of_group(group): group for group in self.plan.groups}.values())

    @cached_property
    def served(self) -> Served | None:
        """What kernels are chosen for; None for a GPU of AMD."""
        sm = self.target.card.sm
        return served_on(self.index, sm, self.target.tp, self.target.vllm) if sm else None

    def _seconds(self, scheme: str, *, rounded: bool) -> float:
        groups = tuple(
            replace(group, scheme=scheme, observer=observer_names.IMPORTANCE, rounding="refit")
            if rounded
            else replace(group, scheme=scheme)
            for group in self.plan.groups
        )
        if not groups:
            return 0.0
        stages = estimates(self.index, replace(self.plan, groups=groups), SAMPLES)
        return sum(stage.seconds for stage in stages if stage.stage != "check")


def recommend(index: SourceIndex, target: Target, others: Sequence[str] = ()) -> Recommendation:
    """Every scheme of a name on the target, and the `others`, such as W4A16_G64; the one to start with.

    Where a scheme's groups do not fit the shapes, the largest that do are a row of their own.

    Raises InputError for a source that cannot be a source, as `build_plan` does.
    """
    settings = Settings(ranks=(target.tp,))
    names = dict.fromkeys((*scheme_names(), *others))
    table = _table(index, settings, tuple(names))
    plan = build_plan(index, (Rule(match="Linear", scheme=PROBE),), settings)
    model = _Model(
        index=index,
        plan=plan,
        target=target,
        weights=rank_weights(index, plan, target.tp),
        kv_cache=kv_cache_of(index, target.tp),
    )
    schemes = tuple(_candidate(model, outlook) for outlook in table.schemes)
    source_row = _placed(model, Candidate(scheme=UNQUANTIZED, runs="in full"), None)
    choice = choose(schemes, source_row)
    small, large = (_running(schemes, preset) for preset in (SMALL, LARGE))
    return Recommendation(
        source=table.source,
        architecture=table.architecture,
        parameters=table.parameters,
        gpu=target.card.name,
        sm=target.card.sm,
        gpu_architecture=target.card.architecture,
        tp=target.tp,
        vllm=short_version(target.vllm),
        context=target.context,
        usable_bytes=target.card.usable_bytes,
        kv_bytes=model.sequence_bytes,
        source_row=source_row,
        schemes=schemes,
        crossover=crossover(model.rank, small, large) if model.rank and small and large else None,
        recommended=choice.scheme,
        alternative=choice.alternative,
        reasons=choice.reasons,
        notes=tuple(_notes(model)),
    )


def _table(index: SourceIndex, settings: Settings, names: tuple[str, ...]) -> SchemeTable:
    """All of the names, and after one whose groups do not fit the same scheme in the largest that do."""
    table = scheme_table(index, (), settings, names)
    smaller = {
        row.scheme: regrouped(get_scheme(row.scheme), row.group_sizes[0]).name
        for row in table.schemes
        if row.group_sizes
    }
    asked = tuple(name for name in smaller.values() if name not in names)
    if not asked:
        return table
    found = {row.scheme: row for row in scheme_table(index, (), settings, asked).schemes}
    rows = [(row, found.get(smaller.get(row.scheme, ""))) for row in table.schemes]
    return replace(table, schemes=tuple(one for pair in rows for one in pair if one is not None))


def _running(schemes: Sequence[Candidate], preset: str) -> str:
    """The first scheme of a preset, in whatever groups, that runs with vLLM alone and fits; else empty."""
    return next((row.scheme for row in schemes if row.fits and preset_of(row.scheme) == preset), "")


def _candidate(model: _Model, outlook: SchemeOutlook) -> Candidate:
    """The row of a scheme: not at all where vLLM, its shapes or the GPU refuse it."""
    scheme = get_scheme(outlook.scheme)
    refused = _refused(scheme, model) or outlook.reason
    card = model.target.card
    runs, reason = _runs_on_rocm(scheme, card.gfx) if card.gfx else _runs(scheme, card.sm)
    cost = model.cost(scheme)
    row = Candidate(
        scheme=scheme.name,
        runs="no" if refused else runs,
        reason=refused or reason,
        explain=f"vexport explain {scheme.name}",
        needs_calibration=outlook.needs_calibration,
        seconds=cost.nearest,
        refit_seconds=cost.refit,
        kernels=() if refused or runs == "no" else model.kernels(scheme),
    )
    return _placed(model, row, scheme.name) if outlook.fits else row


def _placed(model: _Model, row: Candidate, scheme: str | None) -> Candidate:
    """A row with its memory and, where it runs by vLLM's own kernels and fits, its bound."""
    weight_bytes = model.weights.num_bytes(scheme)
    row = replace(row, weight_bytes=weight_bytes)
    free, sequence = model.target.card.usable_bytes - weight_bytes, model.sequence_bytes
    if sequence is None:
        return replace(row, sequences=None, kv_tokens=None) if free > 0 else row
    sequences = max(free, 0) // sequence
    tokens = max(free, 0) * model.target.context // sequence
    row = replace(row, sequences=sequences, kv_tokens=tokens)
    rank = model.rank if row.fits else None
    return replace(row, speed=speed_bound(rank, scheme, sequences)) if rank else row


def _runs(scheme: Scheme, sm: int) -> tuple[Runs, str]:
    """How a GPU runs a scheme, and why not in full."""
    support = scheme.format.gpu_support(scheme.args)
    if support.refuses(sm):
        return "no", f"vLLM does not run it on {generation(sm)}"
    if support.package:
        return "with a package", f"needs {support.package}"
    bits = support.bits(sm)
    if bits == support.stored_bits:
        return "in full", ""
    runs: Runs = "weights only" if bits > support.stored_bits else "coarser inputs"
    return runs, f"inputs of {bits} bits on {generation(sm)}, not {support.stored_bits}"


def _runs_on_rocm(scheme: Scheme, gfx: str) -> tuple[Runs, str]:
    """As far as vLLM's own table of kernels tells."""
    if scheme.name in ROCM_EMULATED:
        return "no", f"vLLM has only an emulation on {gfx}"
    kind = ROCM_KINDS.get(scheme.name)
    if kind is None:
        return "not known", f"which kernel vLLM takes on {gfx} is not known here"
    stored = scheme.format.gpu_support(scheme.args).stored_bits
    coarse = kind == "bf16" and stored < UNQUANTIZED_BITS
    return ("weights only", f"inputs of 16 bits on {gfx}, not {stored}") if coarse else ("in full", "")


def _refused(scheme: Scheme, model: _Model) -> str:
    """Why the vLLM asked for does not run a scheme as the pinned one does; empty where it does."""
    version = nearest_version(model.target.vllm)
    if version == PINNED:
        return ""
    facts, name = facts_of(version), f"vLLM {short_version(version)}"
    if model.index.architecture in facts.absent:
        return f"{name} has no {model.index.architecture}"
    if (implementation := scheme.format.vllm_scheme(scheme.args)) not in facts.schemes:
        return f"{name} has no {implementation}: see `vexport check --vllm`"
    weights = scheme.args.weights
    widths = facts.widths if weights.symmetric else facts.asymmetric_widths
    packed = scheme.format is PACKED and weights.num_bits not in widths
    return f"{name} does not take {weights.num_bits} packed bits" if packed else ""


def _notes(model: _Model) -> Iterator[str]:
    """What is assumed or not known."""
    asked, used = model.target.vllm, nearest_version(model.target.vllm)
    if asked != used:
        yield f"vLLM {short_version(asked)} is not known: the rules of {short_version(used)} are used"
    if model.kv_cache is None:
        yield "the KV cache cannot be told from headers, so no bound: ask `vexport load --dry --gpu`"
    if model.weights.experts.number > 1:
        yield "tokens are taken to go to all experts alike often; fewer are read where they do not"
    if model.target.tp > 1:
        yield "communication between GPUs is not in the bound"
