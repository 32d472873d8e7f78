"""The GPUs that models are served on: their memory and compute capability.

This table is the only source of GPU names. Options, scenarios and reports read it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vexport.errors import did_you_mean

# Numbers or names, as the command line and Python give them: `80,90`, 90, "sm90" or ("H100", 90).
Names = str | float | Iterable[str | float]
# Name of the generation of each compute capability. Sources: NVIDIA's list
# (developer.nvidia.com/cuda-gpus) and vLLM 0.32.
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
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU: its memory in bytes, and its compute capability (90 for 9.0)."""

    name: str
    memory_bytes: int
    sm: int

    @property
    def usable_bytes(self) -> int:
        """Part of the memory that vLLM uses by default, in bytes."""
        return int(self.memory_bytes * UTILIZATION)


# Name, memory in MiB, capability. The memory is the total that `nvidia-smi` prints with the factory
# setting of ECC. DGX Spark and Thor share their memory with the processor, so `nvidia-smi` prints
# no total. For these, the table has the total that CUDA reports (121.6 and 122.8 GiB).
_TABLE = (
    ("V100", 32_768, 70),
    ("T4", 15_360, 75),
    ("A10", 23_028, 86),
    ("A10G", 23_028, 86),
    ("A30", 24_576, 80),
    ("A40", 46_068, 86),
    ("A6000", 49_140, 86),
    ("A100", 81_920, 80),
    ("A100-40GB", 40_960, 80),
    ("RTX3090", 24_576, 86),
    ("L4", 23_034, 89),
    ("L20", 46_068, 89),
    ("L40", 46_068, 89),
    ("L40S", 46_068, 89),
    ("RTX4090", 24_564, 89),
    ("RTX6000-Ada", 49_140, 89),
    ("H20", 97_871, 90),
    ("H100", 81_559, 90),
    ("H100-NVL", 95_830, 90),
    ("H200", 143_771, 90),
    ("GH200", 97_871, 90),
    ("B200", 183_359, 100),
    ("GB200", 189_471, 100),
    ("B300", 275_040, 103),
    ("GB300", 284_208, 103),
    ("Thor", 125_700, 110),
    ("RTX5060", 8_151, 120),
    ("RTX5060Ti", 16_311, 120),
    ("RTX5070", 12_227, 120),
    ("RTX5070Ti", 16_303, 120),
    ("RTX5080", 16_303, 120),
    ("RTX5090", 32_607, 120),
    ("RTX-PRO-4000", 24_467, 120),
    ("RTX-PRO-4500", 32_623, 120),
    ("RTX-PRO-5000", 48_935, 120),
    ("RTX-PRO-6000", 97_887, 120),
    ("DGX-Spark", 124_500, 121),
)
CARDS: Mapping[str, Card] = {
    name: Card(name=name, memory_bytes=memory * _MIB, sm=sm) for name, memory, sm in _TABLE
}
# Other names of the same GPUs.
_ALIASES = {
    "GB10": "DGX-Spark",
    "Spark": "DGX-Spark",
    "AGX-Thor": "Thor",
    "RTXA6000": "A6000",
    "A100-80GB": "A100",
    "H100-80GB": "H100",
    "H200-NVL": "H200",
    "B300-AC": "B300",
    "GH200-480GB": "GH200",
    "H800": "H100",
    "A800": "A100",
    "V100-32GB": "V100",
}


# Words around the name in the output of `nvidia-smi`: the maker, the kind of board, the kind of
# memory.
_IGNORED_WORDS = re.compile(
    r"nvidia|geforce|tesla|jetson|blackwell|hbm\d?e?|sxm\d?|pcie|server|workstation|max-?q|edition"
    r"|[\W_]"
)


def _fold(name: str) -> str:
    return _IGNORED_WORDS.sub("", name.casefold())


_BY_FOLDED_NAME: Mapping[str, Card] = {
    **{_fold(name): card for name, card in CARDS.items()},
    **{_fold(name): CARDS[card] for name, card in _ALIASES.items()},
}


def find_card(name: str) -> Card | None:
    """Return the GPU with this name, or None.

    Case, spaces and punctuation are ignored. Words that `nvidia-smi` prints around the name are
    ignored, too: "NVIDIA H100 80GB HBM3" is "H100".
    """
    return _BY_FOLDED_NAME.get(_fold(name))


def parts_of(value: Names) -> list[str]:
    """Return the numbers and names in `value` as text. Commas separate them.

    Raises ValueError if `value` is of another type.
    """
    each = value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
    found = list(each)
    for part in found:
        if not isinstance(part, str | int | float) or isinstance(part, bool):
            raise ValueError(f"{part!r} is not a number or a name.")
    return [name.strip() for part in found for name in str(part).split(",")]


def parse_sizes(value: Names) -> tuple[int, ...]:
    """Parse tensor parallel sizes: `1,2,4`, 2 or (1, 2). Duplicates are dropped.

    Raises ValueError if a part is not a whole number above zero.
    """
    parts = parts_of(value)
    for part in parts:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", part):
            raise ValueError(
                f"{part!r} is not a number of GPUs; write whole numbers such as 1,2,4."
            )
    return tuple(dict.fromkeys(map(int, parts)))


def parse_capabilities(value: Names) -> tuple[int, ...]:
    """Parse compute capabilities: `80,9.0`, `sm90`, 90 or `H100`. Duplicates are dropped.

    Raises ValueError if a part is not a known capability or GPU.
    """
    parsed = {part: parse_capability(part) for part in parts_of(value)}
    for part, number in parsed.items():
        if number is None:
            known = ", ".join(map(str, GENERATIONS))
            raise ValueError(
                f"{part!r} is not a known compute capability of an NVIDIA GPU.{_similar(part)} "
                f"Write 90, 9.0 or a GPU such as H100. Known: {known}."
            )
    return tuple(dict.fromkeys(filter(None, parsed.values())))


def cards(names: Names) -> tuple[Card, ...]:
    """Return the GPUs with these names, each once. Raises ValueError for an unknown name."""
    found: dict[str, Card] = {}
    for name in parts_of(names):
        card = find_card(name)
        if card is None:
            written = name.strip()
            raise ValueError(
                f"{written!r} is not a known NVIDIA GPU, and vexport has no rules for GPUs of "
                f"other makers.{_similar(written)} For another NVIDIA GPU, use its compute "
                f"capability (--sm 89, or sm=89 in Python). Known: {', '.join(CARDS)}."
            )
        found[card.name] = card
    return tuple(found.values())


def _similar(written: str) -> str:
    """Return the question `did_you_mean` with similar names that begin with the same letter, or "".

    The first letters name the series and the maker: MI300X resembles B300, but is no misspelled
    B300.
    """
    first = _fold(written)[:1]
    return did_you_mean(written, [name for name in CARDS if _fold(name).startswith(first)])


def with_cards(sm: Sequence[int], gpus: Iterable[Card]) -> tuple[int, ...]:
    """Return the compute capabilities and the capabilities of the GPUs, without duplicates."""
    return tuple(dict.fromkeys((*sm, *(card.sm for card in gpus))))


def parse_capability(text: str) -> int | None:
    """Return the compute capability that `text` names, or None.

    `90`, `9.0`, `sm90`, `sm_90a` and the name of a GPU such as `H100` all stand for 90.
    """
    written = re.fullmatch(r"(?:sm[ _-]?)?([0-9]+)(?:\.([0-9]))?[af]?", text.lower())
    if written is None:
        card = find_card(text)
        return card.sm if card else None
    number = int(written[1] + (written[2] or ""))
    return number if number in GENERATIONS else None


def generation(sm: int) -> str:
    """Return a capability with the name of its generation: `SM 90 (Hopper)`."""
    return f"SM {sm} ({GENERATIONS[sm]})" if sm in GENERATIONS else f"SM {sm}"
