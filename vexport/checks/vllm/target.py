"""What a checkpoint is to be served with."""

from collections.abc import Sequence
from dataclasses import dataclass

from vexport.version import PINNED, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Tensor parallel sizes and compute capabilities (90 for SM 9.0), each of which must do; the vLLM."""

    tp: Sequence[int] = ()
    sm: Sequence[int] = ()
    vllm: Version = PINNED


ANY = Target()
