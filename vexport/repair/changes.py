"""The changes that a family of repairs makes, before they are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vexport.records import Json, Repair, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Tensors that replace those of their names, or are new next to the tensor `near`.

    `make` computes them, by the keys of `tensors`, when they are asked for, each time the same.
    """

    tensors: Mapping[str, TensorSpec]
    near: str
    make: "Callable[[], Mapping[str, torch.Tensor]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of one family of repairs: the whole config where it has one, and tensors."""

    repairs: tuple[Repair, ...] = ()
    config: Mapping[str, Json] | None = None
    edits: tuple[Edit, ...] = ()

    def __add__(self, other: "Changes") -> "Changes":
        return replace(self, repairs=self.repairs + other.repairs, edits=self.edits + other.edits)


LOSSLESS = "nothing"


def inside(config: dict[str, Json], *keys: str) -> dict[str, Json]:
    """The object of a config below keys that it is known to have, to be changed in place."""
    for key in keys:
        value = config[key]
        assert isinstance(value, dict), key
        config = value
    return config
