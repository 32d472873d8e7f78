"""What is publicly known to answer wrongly or slowly: versions of vLLM, GPUs, schemes and model classes.

A new entry is one more object in known_bad.json. It holds no more than its public source says.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from vexport.types import Finding

CHECK = "known_bad"


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

    def is_of(self, version: str, class_name: str, *, kv_cache: bool) -> bool:
        """Whether it is about a version, a model class and a cache like these."""
        return (
            version in self.vllm and class_name.startswith(self.classes) and (kv_cache or not self.kv_cache)
        )

    def is_about_layer(self, scheme: str, strategy: str, in_features: int) -> bool:
        """Whether it is about layers of vLLM's class `scheme` of which a rank has so many in_features."""
        if scheme not in self.schemes or self.strategy not in ("", strategy):
            return False
        return not self.inputs_not_multiple_of or bool(in_features % self.inputs_not_multiple_of)

    def finding(self, version: str, sm: Collection[int]) -> Finding:
        """A warning, for these GPUs."""
        return Finding(
            check=CHECK,
            severity="warning",
            where=f"vLLM {version}" + (f", SM {'/'.join(map(str, sorted(sm)))}" if sm else ""),
            expected="a combination that nobody has reported as bad",
            got=f"{self.what} ({self.source})",
            fix=self.fix,
        )


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """All reports."""
    text = files("vexport.architectures").joinpath("known_bad.json").read_text(encoding="utf-8")
    return TypeAdapter(tuple[KnownBad, ...]).validate_json(text)
