"""A bound on speed from data sheets: bytes over bandwidth and operations over the peak, layer by layer.

Kernels of vLLM reach a part of it; LOW and HIGH are the part that is expected. Launches, communication of
ranks, sampling, activations and the scheduler are not counted. Nothing here was measured.
"""

from dataclasses import dataclass

from vexport.formats.arguments import UNQUANTIZED_BITS, QuantArgs
from vexport.formats.gpus import ROCM_KINDS, Arithmetic, Card
from vexport.formats.schemes import get_scheme
from vexport.plan.kv_tokens import KvCacheOfRank
from vexport.plan.rank_weights import Part, RankWeights
from vexport.types import DecodeBound, SpeedBound

LOW, HIGH = 0.5, 0.9
BATCHES = (1, 8, 64)
# Batches among which two schemes are compared.
MOST_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A model on one GPU of those that share it, serving sequences of `context` tokens."""

    card: Card
    weights: RankWeights
    kv_cache: KvCacheOfRank
    context: int

    def decode_seconds(self, scheme: str | None, batch: int) -> float:
        """The least time of a step that makes one token for each of `batch` sequences."""
        weights = sum(self.part_seconds(part, scheme, batch, batch) for part in self.weights.parts)
        attention = self._slower(
            batch * self.kv_cache.read_bytes(self.context),
            batch * self.kv_cache.decode_operations(self.context),
            "bf16",
        )
        return weights + attention + batch * self.weights.row_bytes / self.card.bandwidth

    def prefill_seconds(self, scheme: str | None) -> float:
        """The least time of a prompt of `context` tokens, of which the head sees the last."""
        weights = sum(
            self.part_seconds(part, scheme, self.context, 1 if part.head else self.context)
            for part in self.weights.parts
        )
        attention = self._slower(
            self.kv_cache.read_bytes(self.context),
            self.kv_cache.prefill_operations(self.context),
            "bf16",
        )
        return weights + attention + self.context * self.weights.row_bytes / self.card.bandwidth

    def part_seconds(self, part: Part, scheme: str | None, tokens: int, seen: int) -> float:
        """The least time of a part: experts that `tokens` go through are read once, `seen` are multiplied."""
        experts = self.weights.experts
        share = experts.read(tokens) if part.routed else 1.0
        active = experts.chosen / experts.number if part.routed else 1.0
        quantized = scheme if part.shapes else None
        operations = 2.0 * part.number * part.weights * active * seen
        return self._slower(share * part.num_bytes(scheme), operations, self._kind(quantized))

    def _kind(self, scheme: str | None) -> Arithmetic:
        if self.card.gfx:
            return ROCM_KINDS.get(scheme or "", "bf16")
        return arithmetic(scheme, self.card.sm)

    def _slower(self, num_bytes: float, operations: float, kind: Arithmetic) -> float:
        return max(num_bytes / self.card.bandwidth, operations / self.card.peak[kind])


def arithmetic(scheme: str | None, sm: int) -> Arithmetic:
    """What tensor cores multiply in the kernel that vLLM chooses; weights alone are multiplied in 16 bits."""
    if scheme is None:
        return "bf16"
    known = get_scheme(scheme)
    bits = known.format.gpu_support(known.args).bits(sm)
    if bits == UNQUANTIZED_BITS:
        return "bf16"
    inputs: QuantArgs = known.args.input_activations or known.args.weights
    return "fp4" if bits == 4 else "fp8" if inputs.is_float else "int8"


def speed_bound(rank: Rank, scheme: str | None, sequences: int) -> SpeedBound:
    """The interval of each batch, and of a prompt; `sequences` fit in the memory at once."""
    prefill = rank.context / rank.prefill_seconds(scheme)
    return SpeedBound(
        decode=tuple(_decode(rank, scheme, batch, sequences) for batch in BATCHES),
        prefill_low=LOW * prefill,
        prefill_high=HIGH * prefill,
    )


def _decode(rank: Rank, scheme: str | None, batch: int, sequences: int) -> DecodeBound:
    if batch > sequences:
        return DecodeBound(batch=batch, low=None, high=None)
    tokens = batch / rank.decode_seconds(scheme, batch)
    return DecodeBound(batch=batch, low=LOW * tokens, high=HIGH * tokens)


def crossover(rank: Rank, small: str, large: str) -> int | None:
    """The least batch at which a step in `small` takes as long as in `large`; None where none does."""
    batches = range(1, MOST_BATCH + 1)
    behind = (
        batch for batch in batches if rank.decode_seconds(small, batch) >= rank.decode_seconds(large, batch)
    )
    return next(behind, None)
