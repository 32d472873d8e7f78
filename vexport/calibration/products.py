"""Matrix products of 16-bit layers where a CPU computes them faster in float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vexport.calibration.capture import Forward, replaced_forwards

WIDENED = (torch.bfloat16, torch.float16)


def widens(device: str) -> bool:
    """Whether float32 products are the faster ones: on Intel's CPUs without AMX.

    On one of Sapphire Rapids whose AMX is hidden by its hypervisor torch 2.13 multiplies bf16 at 84 GFLOPS
    and float32 at 154 (one thread, 512 tokens, 576 x 1536).
    """
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    known = torch.cpu.get_capabilities()
    is_intel = "Intel" in str(known.get("cpu_name"))
    has_units = known.get("amx_bf16") or (known.get("avx512_bf16") and not is_intel)
    return known["architecture"] == "x86_64" and not has_units


@contextmanager
def fast_products(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Within the block the model's linear layers of 16 bits multiply in float32 where that is faster.

    Both add up in float32 and round the sum once to the layer's dtype: only the order of the sum differs.
    """
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]

    def wide(number: int, own: Forward) -> Forward:
        module = linears[number]

        def forward(value: torch.Tensor) -> object:
            if value.dtype not in WIDENED or module.weight.dtype != value.dtype:
                return own(value)
            bias = None if module.bias is None else module.bias.to(torch.float32)
            found = torch.nn.functional.linear(value.to(torch.float32), module.weight.to(torch.float32), bias)
            return found.to(value.dtype)

        return forward

    with replaced_forwards(linears if widens(device) else [], wide):
        yield
