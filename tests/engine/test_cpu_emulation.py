"""The emulation plugin is inactive by default, and rounds like compressed-tensors and vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme

from vexport.engine.cpu_emulation import SWITCH
from vexport.engine.cpu_emulation.rounding import (
    fake_fp8,
    fake_mxfp4,
    fake_nvfp4,
    round_fp8,
)
from vexport.engine.session import Worker
from vexport.formats.input_rounding import round_activations
from vexport.records import silent


def rounded_by_compressed_tensors(
    activations: torch.Tensor, preset: str, **scales: torch.Tensor
) -> torch.Tensor:
    args = preset_name_to_scheme(preset, ["Linear"]).input_activations
    return round_activations(activations, args, scales, torch.nn.Linear(1, 1))


@pytest.fixture
def activations() -> torch.Tensor:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1.3
    values[3, :16] = 0.0
    values[5, 7] = 40.0
    return values.to(torch.bfloat16)


def test_register_needs_switch() -> None:
    code = "import sys; from vexport.engine.cpu_emulation import register; register();"
    code += "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


@pytest.mark.vllm
def test_emulated_kernels_are_registered_once(tmp_path: Path) -> None:
    """The MXFP4 kernel accepts only inputs that the emulation can round.

    vLLM 0.33 calls `_supports_quant_scheme`, because an engine argument may request another input
    format. The worker does not import numba: vLLM searches all imported modules for kernels, and
    this search fails in llvmlite.
    """
    worker = Worker(
        module="tests.engine.emulated",
        request={},
        kind=dict,
        where="emulation",
        log=tmp_path / "log",
        timeout=120,
    )
    inputs, int4 = [True, True, True, False, False], [True, True]
    assert worker.run(silent) == {
        "numba": False,
        "offered": [0, 6, 6],
        "inputs": inputs,
        "int4": int4,
    }


def test_fp4_inputs_equal_compressed_tensors(activations: torch.Tensor) -> None:
    assert torch.equal(fake_mxfp4(activations), rounded_by_compressed_tensors(activations, "MXFP4"))
    global_scale = torch.tensor([448 * 6 / 8.0])
    expected = rounded_by_compressed_tensors(activations, "NVFP4", input_global_scale=global_scale)
    assert torch.equal(fake_nvfp4(activations, global_scale), expected)


@pytest.mark.parametrize(
    ("preset", "group"), [("FP8_BLOCK", 128), ("FP8_DYNAMIC", -1), ("FP8", None)]
)
def test_fp8_inputs_equal_compressed_tensors(
    activations: torch.Tensor, preset: str, group: int | None
) -> None:
    scale = torch.tensor([8.0 / 448])
    expected = rounded_by_compressed_tensors(activations, preset, input_scale=scale)
    if group is None:
        rounded = (round_fp8(activations, scale).to(torch.float32) * scale).to(torch.bfloat16)
    else:
        rounded = fake_fp8(activations, group)
    # vLLM multiplies with the scale's reciprocal, compressed-tensors divides. Ties may differ.
    assert (rounded != expected).float().mean() < 0.001
