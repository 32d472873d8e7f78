"""Golden values of llm-compressor 0.14.0.1, recorded."""

import json
import warnings
from functools import cache
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BaseModel
from safetensors.torch import load_file

from vexport.observers import IMatrixMSEObserver, Observer

FOLDER = Path(__file__).parent / "golden"
ArgValue = bool | int | str | list[int]


class Case(BaseModel):
    """One run of the peer: what it was told and the names of what it observed."""

    dtype: str
    observer: str
    base_name: str
    args: dict[str, ArgValue]
    observed: list[str]
    fused_with_factor: int | None = None

    @property
    def quantization_args(self) -> QuantizationArgs:
        return QuantizationArgs(**self.args)

    def __str__(self) -> str:
        given = "-".join(str(value) for value in self.args.values())
        fused = "-fused" if self.fused_with_factor else ""
        return f"{self.observer}-{self.base_name}-{given}{fused}-{self.dtype}"


@cache
def values() -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(FOLDER / "values.safetensors")
    return loaded


def cases() -> list[Case]:
    """All cases; the results of case n are named `n.low`, `n.scale`, ..."""
    return [Case.model_validate(case) for case in json.loads((FOLDER / "cases.json").read_text())]


def observe(case: Case) -> Observer:
    """vexport's observer after what the peer's observed."""
    seen = [values()[name] for name in case.observed]
    observer = new_observer(case)
    for value in seen:
        quietly(observer, value)
    if case.fused_with_factor:
        other = new_observer(case)
        Observer.fuse([observer, other])
        quietly(other, seen[0] * case.fused_with_factor)
    return observer


def new_observer(case: Case) -> Observer:
    """vexport's observer, with importance gathered where the peer gathers it."""
    args = case.quantization_args
    observer = Observer.load_from_registry(case.observer, base_name=case.base_name, args=args)
    if isinstance(observer, IMatrixMSEObserver) and case.base_name == "weight":
        activations = values()["activations"]
        layer = torch.nn.Linear(activations.shape[-1], 1)
        observer.attach(layer)
        layer(activations)
        observer.detach(layer)
    return observer


def quietly(observer: Observer, value: torch.Tensor) -> None:
    """Observe without the warning that there is no importance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        observer(value)
