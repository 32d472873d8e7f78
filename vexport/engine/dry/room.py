"""What fits on a GPU next to the weights."""

from collections.abc import Iterator, Sequence

from vexport.formats.gpus import Card
from vexport.types import GpuRoom, RankMemory


def rooms(memory: Sequence[RankMemory], cards: Sequence[Card]) -> Iterator[GpuRoom]:
    """For each card, tensor parallel size and length of a sequence how many sequences fit at once.

    An upper bound: what a step computes with and CUDA graphs take their part, which vLLM measures at its
    start (1 to 3 GB, more with long prompts).
    """
    for card in cards:
        for rank in memory:
            free = card.usable_bytes - rank.weight_bytes
            for sequence in rank.sequences:
                fitting = max(free, 0) // sequence.kv_bytes if sequence.kv_bytes else 0
                yield GpuRoom(
                    gpu=card.name,
                    tp=rank.tp,
                    kv_bytes=free,
                    tokens=sequence.tokens,
                    sequences=fitting,
                )
