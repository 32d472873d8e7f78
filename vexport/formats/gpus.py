"""The GPUs that vLLM's rules are about: compute capabilities and the generations that have them.

Sources: NVIDIA's list (developer.nvidia.com/cuda-gpus), and what vLLM 0.32 names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GENERATIONS: Mapping[int, str] = {
    **dict.fromkeys((60, 61, 62), "Pascal"),
    **dict.fromkeys((70, 72), "Volta"),
    75: "Turing",
    **dict.fromkeys((80, 86, 87, 88), "Ampere"),
    89: "Ada",
    90: "Hopper",
    **dict.fromkeys((100, 101, 103), "Blackwell"),
    107: "Rubin",
    **dict.fromkeys((110, 120, 121), "Blackwell"),
}


# vLLM's default of --gpu-memory-utilization (vllm/config/cache.py, 0.32).
UTILIZATION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU that models are served on: its memory in bytes as `nvidia-smi` prints it, and its capability."""

    name: str
    memory_bytes: int
    sm: int

    @property
    def usable_bytes(self) -> int:
        """The bytes that vLLM takes of the memory."""
        return int(self.memory_bytes * UTILIZATION)


_MIB = 2**20
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(name="A100", memory_bytes=81_920 * _MIB, sm=80),
        Card(name="A100-40GB", memory_bytes=40_960 * _MIB, sm=80),
        Card(name="L4", memory_bytes=23_034 * _MIB, sm=89),
        Card(name="L40S", memory_bytes=46_068 * _MIB, sm=89),
        Card(name="RTX4090", memory_bytes=24_564 * _MIB, sm=89),
        Card(name="H100", memory_bytes=81_559 * _MIB, sm=90),
        Card(name="H200", memory_bytes=143_771 * _MIB, sm=90),
        Card(name="B200", memory_bytes=183_359 * _MIB, sm=100),
        Card(name="RTX5090", memory_bytes=32_607 * _MIB, sm=120),
    )
}


def cards(names: Iterable[str]) -> tuple[Card, ...]:
    """The GPUs of these names, each once; ValueError for one that is not in the table."""
    known = {name.lower(): card for name, card in CARDS.items()}
    parts = dict.fromkeys(name.strip().lower().replace(" ", "") for name in names)
    for part in parts:
        if part not in known:
            raise ValueError(f"{part!r} is not a known GPU. Known: {', '.join(CARDS)}.")
    return tuple(known[part] for part in parts)


def parse_capability(text: str) -> int | None:
    """90 for `90`, `9.0` and `sm90`; None for what no GPU of the table has."""
    written = re.fullmatch(r"(?:sm[ _-]?)?(\d+)(?:\.(\d))?[af]?", text.lower())
    number = int(written[1] + (written[2] or "")) if written else 0
    return number if number in GENERATIONS else None


def generation(sm: int) -> str:
    """`SM 90 (Hopper)`."""
    return f"SM {sm} ({GENERATIONS[sm]})" if sm in GENERATIONS else f"SM {sm}"
