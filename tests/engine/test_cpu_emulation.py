"""The plugin stays out of the way, and its rounding is compressed-tensors' and vLLM's."""

import os
import subprocess
import sys

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme

from vexport.engine.cpu_emulation import SWITCH
from vexport.engine.cpu_emulation.rounding import fake_fp8, fake_mxfp4, fake_nvfp4, round_fp4, round_fp8
from vexport.formats.input_rounding import round_activations

# vLLM's search for kernels in all modules trips over llvmlite.
OFFERED = """
import os, sys
import vexport.engine.cpu_emulation.kernels
numba = "numba" in sys.modules
from vexport.engine.cpu_emulation import SWITCH, register
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.platforms import PlatformEnum

kinds = ("", "_FP8", "_WFP8A16", "_MXFP4", "_MXFP8")
tables = [getattr(linear, f"_POSSIBLE{kind}_KERNELS") for kind in kinds]

def count():
    kernels = [kernel for table in tables for kernel in table.get(PlatformEnum.CPU, [])]
    return sum("Emulation" in kernel.__name__ for kernel in kernels)

register()
before = count()
os.environ[SWITCH] = "1"
register()
register()
from vexport.engine.cpu_emulation.kernels import EmulationMxFp4Linear as Kernel
inputs = [None, keys.kMxfp4Dynamic, keys.kFp8DynamicTokenSym]
inputs += [keys.kFp8StaticTensorSym, keys.kInt8StaticChannelSym]
print(numba, before, count(), [Kernel._supports_quant_scheme(keys.kMxfp4Static, key) for key in inputs])
"""

# The weight of a layer whose outputs come first, and of the same one as GPTQ and AWQ store it.
LAID_OUT = """
import torch
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types
from vexport.engine.cpu_emulation.kernels import EmulationWNA16Linear

torch.manual_seed(0)
words, zeros = (torch.randint(-2**31, 2**31 - 1, size, dtype=torch.int32) for size in ((32, 8), (4, 2)))
scales = torch.rand(32, 2, dtype=torch.bfloat16)

def parameter(data, flipped):
    parameter = torch.nn.Parameter(data.t() if flipped else data, requires_grad=False)
    parameter.input_dim, parameter.output_dim = int(not flipped), int(flipped)
    return parameter

def weight(flipped):
    layer = torch.nn.Module()
    layer.weight, layer.scales, layer.zeros = (parameter(data, flipped) for data in (words, scales, zeros))
    config = MPLinearLayerConfig((64, 32), (64, 32), scalar_types.uint4, torch.bfloat16, 32, True)
    EmulationWNA16Linear(config, "weight", "scales", "zeros").process_weights_after_loading(layer)
    return layer.weight

shifts = 4 * torch.arange(8)
codes = (words[:, :, None] >> shifts & 15).reshape(32, 2, 32)
offsets = (zeros[:, None] >> shifts[:, None] & 15).reshape(32, 2)
expected = ((codes - offsets[..., None]) * scales.float()[..., None]).reshape(32, 64).bfloat16()
print([torch.equal(weight(flipped), expected) for flipped in (False, True)])
"""


def by_compressed_tensors(activations: torch.Tensor, preset: str, **scales: torch.Tensor) -> torch.Tensor:
    args = preset_name_to_scheme(preset, ["Linear"]).input_activations
    return round_activations(activations, args, scales, torch.nn.Linear(1, 1))


@pytest.fixture
def activations() -> torch.Tensor:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1.3
    values[3, :16] = 0.0
    values[5, 7] = 40.0
    return values.to(torch.bfloat16)


def test_register_is_inert_unless_asked() -> None:
    code = "import sys; from vexport.engine.cpu_emulation import register; register();"
    code += "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.vllm
def test_kernels_are_offered_once_and_only_when_asked_and_dequantize_int4_in_either_layout() -> None:
    """MXFP4 with the inputs that are rounded here: vLLM 0.33 asks, as an engine argument may name others."""
    environment = {**os.environ, SWITCH: "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(
        [sys.executable, "-c", OFFERED + LAID_OUT], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    expected = ["False 0 6 [True, True, True, False, False]", "[True, True]"]
    assert ran.stdout.splitlines()[-2:] == expected


def test_fp4_rounds_ties_to_even() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(round_fp4(ties), expected)
    assert torch.equal(round_fp4(-ties), -expected)


def test_fp4_activations_are_compressed_tensors(activations: torch.Tensor) -> None:
    assert torch.equal(fake_mxfp4(activations), by_compressed_tensors(activations, "MXFP4"))
    global_scale = torch.tensor([448 * 6 / 8.0])
    expected = by_compressed_tensors(activations, "NVFP4", input_global_scale=global_scale)
    assert torch.equal(fake_nvfp4(activations, global_scale), expected)


@pytest.mark.parametrize(("preset", "group"), [("FP8_BLOCK", 128), ("FP8_DYNAMIC", -1), ("FP8", None)])
def test_fp8_inputs_are_compressed_tensors(activations: torch.Tensor, preset: str, group: int | None) -> None:
    scale = torch.tensor([8.0 / 448])
    expected = by_compressed_tensors(activations, preset, input_scale=scale)
    if group is None:
        rounded = (round_fp8(activations, scale).to(torch.float32) * scale).to(torch.bfloat16)
    else:
        rounded = fake_fp8(activations, group)
    # One divides by the scale, the other multiplies with its reciprocal: ties may fall either way.
    assert (rounded != expected).float().mean() < 0.001
