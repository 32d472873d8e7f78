"""Checkpoints in their own formats, as AutoRound, AutoAWQ, GPTQModel, ModelOpt and Quark wrote them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import vexport
from tests.models import problems
from tests.mutations.edits import Change, drop, put, spoiled, swap, tensors

CHECKPOINTS = Path(__file__).parent / "methods"
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
SOURCES = Path(__file__).parent.parent / "peer"
# One of each storage.
SPOILED = (
    "autoround-llama-MXFP4-auto_round",
    "autoround-llama-W4A16-auto_awq",
    "autoround-llama-W4A16-auto_round",
    "modelopt-llama-FP8-KV",
    "modelopt-llama-MIXED",
    "modelopt-llama-NVFP4-KV",
    "quark-llama-fp8-KV",
    "quark-llama-int4_wo_32",
    "quark-llama-int8",
    "quark-llama-mxfp4",
)
CODES = ("qweight", "weight_packed", "weight")
LAYER = "model.layers.0"
K, UP, GATE = f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj"


def source_of(name: str) -> Path:
    return SOURCES / name.split("-")[1]


def changes(root: Path) -> Mapping[str, Change]:
    """Ten ways to spoil a checkpoint of any method, by the names that it stores."""
    stored = load_file(root / "model.safetensors")
    codes = next(f"{K}.{each}" for each in CODES if f"{K}.{each}" in stored)
    scale = next(name for name in stored if name.startswith(f"{K}.") and name.endswith(("scale", "scales")))
    parameter = codes.removeprefix(f"{K}.")

    def unquantized(values: dict[str, torch.Tensor]) -> None:
        for name in [name for name in values if name.startswith(f"{K}.")]:
            del values[name]
        values[f"{K}.weight"] = torch.full((32, 128), 0.01, dtype=torch.bfloat16)

    return {
        "no codes": drop(codes),
        "no scale": drop(scale),
        "codes all zero": put(codes, torch.zeros_like),
        "codes the other way": put(codes, lambda value: value.T),
        "a half of the codes": put(codes, lambda value: value[: len(value) // 2]),
        "another layer's codes": swap(f"{UP}.{parameter}", f"{GATE}.{parameter}"),
        "a scale that is not a number": put(scale, worst),
        "a layer that is not quantized": tensors(unquantized),
        "a norm gone": drop(f"{LAYER}.input_layernorm.weight"),
        "a file that is cut": cut,
    }


def worst(value: torch.Tensor) -> torch.Tensor:
    """A NaN in front, of exponents 255."""
    if value.dtype == torch.uint8:
        return torch.cat([torch.full((1,), 255, dtype=torch.uint8), value.flatten()[1:]]).reshape(value.shape)
    flat = value.float().flatten().clone()
    flat[0] = float("nan")
    return flat.reshape(value.shape).to(value.dtype)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name", NAMES)
def test_what_producers_write_has_no_error(name: str) -> None:
    """But for what vLLM refuses: GPTQ of 3 bits, which can be converted."""
    errors = [each for each in problems(CHECKPOINTS / name) if each.severity == "error"]
    assert ["3 bits" in each.got for each in errors] == ([True] if name.endswith("W3") else [])


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_spoiled_is_found(name: str, tmp_path: Path) -> None:
    sound = CHECKPOINTS / name
    broken = [
        spoiled(sound, tmp_path / str(number), change)
        for number, change in enumerate(changes(sound).values())
    ]
    ran = vexport("check", sound, *broken, "--source", source_of(name), "--format", "json", "--quiet")
    right, *wrong = (report["ok"] for report in json.loads(ran.stdout))
    passed = [what for what, ok in zip(changes(sound), wrong, strict=True) if ok]
    assert (ran.code, right, passed) == (1, True, [])
