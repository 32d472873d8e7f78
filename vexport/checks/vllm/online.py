"""Rotations that a model computes when it runs, as `transform_config` announces them.

Source: get_linear_transform_schemes and CompressedTensorsLinearTransformMethod in vLLM's transform/linear.py.
The other rotations are in the weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vexport.checks.vllm.matching import LINEAR, matches_any
from vexport.types import Json

INPUT, OUTPUT = "input", "output"
IN_WEIGHTS = ("weight_input", "weight_output")


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
