"""What a checkpoint is to be served with."""

from collections.abc import Sequence
from dataclasses import dataclass

# Major and minor number of a vLLM: (0, 32).
Version = tuple[int, int]
# The version that the checks know by heart: that of the table of architectures.
PINNED: Version = (0, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Tensor parallel sizes and compute capabilities (90 for SM 9.0), each of which must do; the vLLM."""

    tp: Sequence[int] = ()
    sm: Sequence[int] = ()
    vllm: Version = PINNED


ANY = Target()


def short_version(version: Version) -> str:
    """0.32."""
    return ".".join(map(str, version))
