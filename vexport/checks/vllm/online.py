"""Rotations that a model computes when it runs, as `transform_config` announces them.

Source: get_linear_transform_schemes and CompressedTensorsLinearTransformMethod in vLLM's transform/linear.py.
The other rotations are in the weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from vexport.checks.vllm.matching import LINEAR, matches_any
from vexport.formats.arguments import TORCH_DTYPE
from vexport.types import Json

INPUT, OUTPUT = "input", "output"
IN_WEIGHTS = ("weight_input", "weight_output")


def _known_dtype(value: object) -> object:
    """The name of a torch dtype, as it may be spelled."""
    if isinstance(value, str) and not TORCH_DTYPE.match(f"torch.{value.removeprefix('torch.')}"):
        raise ValueError("no torch dtype")
    return value


Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


@dataclass(kw_only=True)
class _Apply:
    """What compressed-tensors reads an entry of `apply` as (TransformArgs)."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    targets: Names
    location: Literal["input", "weight_input", "weight_output", "output", "k_cache", "q_attn"]
    inverse: bool = False
    ignore: Names = field(default_factory=list)


@dataclass(kw_only=True)
class _Scheme:
    """The same of a scheme (TransformScheme)."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    type: str
    apply: list[_Apply] = field(default_factory=list)
    randomize: bool = False
    requires_grad: bool = False
    head_dim: int | None = None
    precision: Annotated[str, BeforeValidator(_known_dtype)] = "float32"


def unreadable_schemes(groups: Json) -> Iterator[tuple[str, str]]:
    """The keys of a transform_config's groups that compressed-tensors refuses, and why."""
    try:
        TypeAdapter(dict[str, _Scheme]).validate_python(groups)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            yield ".".join(map(str, one["loc"])), f"{one['msg']}: {one['input']!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTransform:
    """One entry of a scheme's `apply`; `kind` is the scheme's type, `location` input or output of a layer."""

    scheme: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    @property
    def submodule(self) -> str:
        """The name of the submodule that stores its matrix."""
        return f"{self.scheme}_{self.location}"

    def applies(self, module: str) -> bool:
        """Whether it rotates the inputs or outputs of a linear layer."""
        return self._names(module, self.targets) and not self._names(module, self.ignore)

    def _names(self, module: str, patterns: tuple[str, ...]) -> bool:
        return LINEAR in patterns or matches_any(module, patterns)


def online_transforms(quantization: Mapping[str, Json] | None) -> tuple[OnlineTransform, ...]:
    """Those of a quantization config, in order; what cannot be read is left out."""
    config = (quantization or {}).get("transform_config")
    groups = config.get("config_groups") if isinstance(config, dict) else None
    return tuple(_transforms(groups)) if isinstance(groups, dict) else ()


def _transforms(groups: Mapping[str, Json]) -> Iterator[OnlineTransform]:
    for scheme, raw in groups.items():
        entries = raw.get("apply") if isinstance(raw, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(raw, dict) and isinstance(entry, dict) and entry.get("location") not in IN_WEIGHTS:
                yield OnlineTransform(
                    scheme=scheme,
                    kind=str(raw.get("type")),
                    location=str(entry.get("location")),
                    targets=_patterns(entry.get("targets")),
                    ignore=_patterns(entry.get("ignore")),
                )


def _patterns(raw: Json) -> tuple[str, ...]:
    return tuple(
        str(pattern) for pattern in (raw if isinstance(raw, list) else [raw] if isinstance(raw, str) else [])
    )
