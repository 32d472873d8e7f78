"""Checkpoints of other quantization methods, with harmful and harmless changes."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import torch

from tests.architectures.families import split
from tests.checks.quant_methods import CHECKPOINTS, write
from tests.checks.spoiled_methods import LAYER, SPOILED, quantization
from tests.models import save_llama
from tests.mutations.edits import (
    WEIGHTS,
    Change,
    Tensors,
    all_of,
    drop,
    file_bytes,
    header,
    put,
    tensors,
)
from tests.mutations.good import vary_norms
from tests.mutations.recorded import FOLDER

METHOD_RECORDS = FOLDER / "methods-0.32.0.jsonl"
# Checkpoints that vLLM's CPU build has run, with its kernels or with vexport's emulation.
RUN = (
    *(
        "gptq",
        "gptq_v2",
        "awq",
        "auto-round",
        "auto-round-mxfp4",
        "fp8-static",
        "fp8-dynamic",
        "fp8-block",
    ),
    *("quark-fp8", "quark-int8", "quark-int4", "quark-uint4", "quark-mxfp4", "modelopt-fp8"),
    "modelopt-nvfp4",
)
RUN_RECORDS = FOLDER / "methods-run-0.32.0.jsonl"
SOURCE = "source of all"
CODES = ("qweight", "weight_packed", "weight")
SCALES = ("scales", "weight_scale", "weight_scale_inv")
NORM = f"{LAYER}.input_layernorm.weight"
Edit = Callable[[torch.Tensor], torch.Tensor]


def write_methods(root: Path, names: Iterable[str] = CHECKPOINTS) -> Path:
    """Write the sound checkpoints with these names below `root`, and their source."""
    source = save_llama(root / SOURCE)
    vary_norms(source)
    for name in names:
        write(name, source, root / name)
    return root


def quant_method(name: str) -> str:
    return str(CHECKPOINTS[name][0]["quant_method"])


@cache
def method_mutations(name: str) -> Mapping[str, Change]:
    own = {what: change for what, (change, _, _) in SPOILED.get(name, {}).items()}
    return {**any_method(LAYER), **own, **HARMLESS}


def stored(values: Tensors, module: str, parameters: tuple[str, ...]) -> str:
    """Return the name of the first of these parameters that a layer has."""
    return next(name for each in parameters if (name := f"{module}.{each}") in values)


def edited(module: str, parameters: tuple[str, ...], edit: Edit) -> Change:
    def change(values: Tensors) -> None:
        name = stored(values, module, parameters)
        values[name] = edit(values[name]).contiguous()

    return tensors(change)


def dropped(module: str, parameters: tuple[str, ...]) -> Change:
    def change(values: Tensors) -> None:
        del values[stored(values, module, parameters)]

    return tensors(change)


def _with_nan(value: torch.Tensor) -> torch.Tensor:
    """Set the first value to NaN, or to 255 if values are exponents."""
    flat = (
        value.flatten().clone() if value.dtype == torch.uint8 else value.float().flatten().clone()
    )
    flat[0] = 255 if value.dtype == torch.uint8 else float("nan")
    return flat.reshape(value.shape).to(value.dtype)


def any_method(layer: str) -> Mapping[str, Change]:
    """Return damages of a decoder layer that do not depend on the names of its tensors."""
    key, up, gate = f"{layer}.self_attn.k_proj", f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"

    def exchange(values: Tensors) -> None:
        first, second = (stored(values, module, CODES) for module in (up, gate))
        values[first], values[second] = values[second], values[first]

    return {
        "no codes": dropped(key, CODES),
        "no scales": dropped(key, SCALES),
        "codes all zero": edited(key, CODES, torch.zeros_like),
        "codes the other way": edited(key, CODES, lambda value: value.T),
        "a half of the codes": edited(key, CODES, lambda value: value[: len(value) // 2]),
        "another layer's codes": tensors(exchange),
        "a scale that is NaN": edited(key, SCALES, _with_nan),
        "a layer's norm gone": drop(f"{layer}.input_layernorm.weight"),
        "a file that is cut": file_bytes(WEIGHTS, lambda data: data[:-100]),
    }


def _sharded(folder: Path) -> None:
    split(folder, 2)


HARMLESS: Mapping[str, Change] = {
    "a key that nobody reads": quantization(comment="made on a Monday"),
    "two files and an index": _sharded,
    "no metadata": header(lambda entries: entries.pop("__metadata__", None)),
    "a norm as float32": put(NORM, torch.Tensor.float),
    "two harmless changes": all_of(_sharded, quantization(comment="made on a Monday")),
}
