"""What is publicly known to answer wrongly or slowly: versions of vLLM, GPUs, schemes and model classes.

A new entry is one more object in known_bad.json. It holds no more than its public source says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """One report; what it does not name, it is not limited to.

    `vllm` are the versions that it was reported for, `sm` compute capabilities, `schemes` vLLM's classes of
    linear layers, `strategy` that of the weights, `classes` the beginning of a model class, `kv_cache` says
    whether it is about a quantized one, `inputs_not_multiple_of` what divides no rank's in_features.
    """

    what: str
    vllm: Sequence[str]
    sm: Sequence[int] = ()
    schemes: Sequence[str] = ()
    strategy: str = ""
    classes: str = ""
    kv_cache: bool = False
    inputs_not_multiple_of: int = 0
    fix: str
    source: str


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """All reports."""
    text = files("vexport.architectures").joinpath("known_bad.json").read_text(encoding="utf-8")
    return TypeAdapter(tuple[KnownBad, ...]).validate_json(text)
