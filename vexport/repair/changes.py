"""Records of repairs: changes that a family makes, what they did and what they cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vexport.records import Finding, Json, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The distance that a layer's weight moved, dequantized by compressed-tensors before and after.

    `relative` is |after - before| / |before| in Frobenius norms, `snr_db` the same as signal-to-noise; None
    where the layer could not be dequantized before. `source_snr_db` are the weight's signal-to-noise
    against the source before and after, None without a source.
    """

    relative: float | None
    snr_db: float | None
    source_snr_db: tuple[float | None, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One thing that was repaired: where, what was there, what is there now, what it costs.

    `layer` is the linear layer whose weight the repair may move, None for all else; `change` says how far.
    """

    family: str
    where: str
    got: str
    now: str
    cost: str
    layer: str | None = None
    change: WeightChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The repairs of a checkpoint, and the findings that keep it from being sound.

    `ok` means that `out` was written and that `vexport check` finds no error in it; else `refusals` say what
    cannot be repaired, and nothing was written. `warnings` remain in what was written.
    """

    schema: Literal["vexport.repair/1"] = "vexport.repair/1"
    checkpoint: str
    out: str
    ok: bool
    repairs: tuple[Repair, ...]
    refusals: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()


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
