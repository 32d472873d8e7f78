"""What torch writes on a device is to the byte what the kernels write; here the device is the CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.families import save_family
from vexport.checkpoint.index import SourceIndex
from vexport.errors import InputError
from vexport.on_device import compress_group
from vexport.pipeline import plan_source, rules_for
from vexport.quantize import quantize
from vexport.searched import search_scales
from vexport.types import Plan

ON_CPU = partial(compress_group, device="cpu")


def planned(source: Path, scheme: str, observer: str) -> tuple[SourceIndex, Plan]:
    return plan_source(str(source), rules_for(scheme, observer=observer, ignore=()))


@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse"])
@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W4A16_ASYM"])
@pytest.mark.parametrize("family", ["llama", "qwen3-vl-moe"])
def test_the_bytes_are_those_of_the_kernels(family: str, scheme: str, observer: str, tmp_path: Path) -> None:
    index, plan = planned(save_family(family, tmp_path / "source"), scheme, observer)
    assert plan.groups
    for name, compress in (("kernels", None), ("device", ON_CPU)):
        (tmp_path / name).mkdir()
        quantize(index, plan, None, tmp_path / name, search=search_scales, compress=compress)
    kernels, device = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "kernels", tmp_path / "device")
    )
    assert device == kernels


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    source = save_family("llama", tmp_path / "source")
    tensors: dict[str, torch.Tensor] = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    index, plan = planned(source, "FP8_DYNAMIC", "memoryless_minmax")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=name):
        quantize(index, plan, None, tmp_path / "out", compress=ON_CPU)
