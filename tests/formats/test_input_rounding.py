"""Inputs are rounded as compressed-tensors rounds them, to the bit."""

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from vexport.formats.dequantize import ct_scheme
from vexport.formats.input_rounding import InputRounding, round_activations
from vexport.formats.schemes import get_scheme


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4"])
def test_e2m1_inputs_are_those_of_compressed_tensors(scheme: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(3, 50, 96, generator=generator) * 4).to(torch.bfloat16)
    value[0, 1] = 0.0
    value[1, 2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    args = ct_scheme(get_scheme(scheme).args).input_activations
    assert args is not None
    own = {"input_global_scale": torch.tensor([100.0])} if scheme == "NVFP4" else {}
    module = torch.nn.Linear(1, 1)
    exact = value.to(torch.float32).reshape(1, -1, 96)
    with torch.compiler.set_stance("force_eager"):
        global_scale = own.get("input_global_scale")
        scale, zero = compute_dynamic_scales_and_zp(exact, args, module, global_scale=global_scale)
        wanted = fake_quantize(exact, scale, zero, args, global_scale=global_scale)
    rounded = round_activations(value, args, own, module)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, wanted.reshape(value.shape).to(torch.bfloat16))


def test_an_input_that_layers_share_is_rounded_once() -> None:
    args = ct_scheme(get_scheme("MXFP4").args).input_activations
    assert args is not None
    rounding, module = InputRounding(args, {}), torch.nn.Linear(1, 1)
    value = torch.linspace(-3, 3, 64).reshape(1, 2, 32)
    (first,), (second,) = rounding.hook(module, (value,)), rounding.hook(module, (value,))
    assert second is first
    assert torch.equal(first, round_activations(value, args, {}, module))
    (other,) = rounding.hook(module, (2 * value,))
    assert torch.equal(other, 2 * first)
