"""The GPUs that vLLM's rules are about: compute capabilities and the generations that have them.

Sources: NVIDIA's list (developer.nvidia.com/cuda-gpus), and what vLLM 0.32 names.
"""

import re
from collections.abc import Mapping

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


def parse_capability(text: str) -> int | None:
    """90 for `90`, `9.0` and `sm90`; None for what no GPU of the table has."""
    written = re.fullmatch(r"(?:sm[ _-]?)?(\d+)(?:\.(\d))?[af]?", text.lower())
    number = int(written[1] + (written[2] or "")) if written else 0
    return number if number in GENERATIONS else None


def generation(sm: int) -> str:
    """`SM 90 (Hopper)`."""
    return f"SM {sm} ({GENERATIONS[sm]})" if sm in GENERATIONS else f"SM {sm}"
