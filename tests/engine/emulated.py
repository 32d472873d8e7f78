"""A worker that reports the kernels of the CPU emulation, and a test of its INT4 kernel."""

import os
import sys

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vexport.engine.cpu_emulation import SWITCH, register
from vexport.engine.cpu_emulation.kernels import EmulationMxFp4Linear, EmulationWNA16Linear
from vexport.engine.worker import run_worker

KINDS = ("", "_FP8", "_WFP8A16", "_MXFP4", "_MXFP8")
INPUTS = (None, keys.kMxfp4Dynamic, keys.kFp8DynamicTokenSym)
OTHER_INPUTS = (keys.kFp8StaticTensorSym, keys.kInt8StaticChannelSym)


def offered_kernels() -> int:
    """Return the number of emulated kernels that vLLM can choose from."""
    tables = [getattr(linear, f"_POSSIBLE{kind}_KERNELS") for kind in KINDS]
    kernels = [kernel for table in tables for kernel in table.get(PlatformEnum.CPU, [])]
    return sum("Emulation" in kernel.__name__ for kernel in kernels)


def loaded_weight(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, flipped: bool
) -> torch.Tensor:
    """Return a layer's weight. Outputs are first, or last (`flipped`) as in GPTQ and AWQ."""
    layer = torch.nn.Module()
    for name, data in (("weight", words), ("scales", scales), ("zeros", zeros)):
        parameter = torch.nn.Parameter(data.t() if flipped else data, requires_grad=False)
        set_weight_attrs(parameter, {"input_dim": int(not flipped), "output_dim": int(flipped)})
        layer.register_parameter(name, parameter)
    config = MPLinearLayerConfig((64, 32), (64, 32), scalar_types.uint4, torch.bfloat16, 32, True)
    EmulationWNA16Linear(config, "weight", "scales", "zeros").process_weights_after_loading(layer)  # type: ignore[arg-type]
    return layer.get_parameter("weight")


def dequantizes_int4(*, flipped: bool) -> bool:
    """Return whether the INT4 kernel's weight equals its codes, zero points and scales."""
    torch.manual_seed(0)
    words, zeros = (
        torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32) for size in ((32, 8), (4, 2))
    )
    scales = torch.rand(32, 2, dtype=torch.bfloat16)
    shifts = 4 * torch.arange(8)
    codes = (words[:, :, None] >> shifts & 15).reshape(32, 2, 32)
    offsets = (zeros[:, None] >> shifts[:, None] & 15).reshape(32, 2)
    expected = ((codes - offsets[..., None]) * scales.float()[..., None]).reshape(32, 64).bfloat16()
    return torch.equal(loaded_weight(words, scales, zeros, flipped=flipped), expected)


def answer(request: dict[str, object]) -> dict[str, object]:
    counts = []
    for switch in ("0", "1", "1"):
        os.environ[SWITCH] = switch
        register()
        counts.append(offered_kernels())
    takes = EmulationMxFp4Linear._supports_quant_scheme
    return {
        "numba": "numba" in sys.modules,
        "offered": counts,
        "inputs": [bool(takes(keys.kMxfp4Static, key)) for key in (*INPUTS, *OTHER_INPUTS)],
        "int4": [dequantizes_int4(flipped=flipped) for flipped in (False, True)],
    }


def main(arguments: list[str]) -> int:
    return run_worker(arguments, dict, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
