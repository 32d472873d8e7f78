"""Observers without the command line: calibrate any torch.nn.Module and read its quantization
parameters.

    python scenarios/observers_example.py

A small network gets NVFP4 weights and inputs. Its two first layers run as one in a serving engine,
so they share their global scales, as q, k and v or gate and up of a language model do.
"""

import torch
from compressed_tensors.quantization import preset_name_to_scheme

from vexport.calibration import (
    calibrate_input_hook,
    freeze_module_quantization,
    get_modules,
    initialize_observer,
    observe,
    update_qparams,
)
from vexport.observers import Observer, get_observer_token_count


class GatedNetwork(torch.nn.Module):
    """What a language model has after its attention: gate and up, multiplied, then down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 128, bias=False)
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States (batch, tokens, 64) to states of the same shape."""
        gated: torch.Tensor = torch.nn.functional.silu(self.gate(states)) * self.up(states)
        down: torch.Tensor = self.down(gated)
        return down


def main() -> None:
    """Attach, run, read, freeze."""
    torch.manual_seed(0)
    network = GatedNetwork()

    # 1. Say how each layer is quantized and attach its observers.
    hooks = []
    for module in (network.gate, network.up, network.down):
        module.quantization_scheme = preset_name_to_scheme("NVFP4", ["Linear"])
        initialize_observer(module, "weight")
        initialize_observer(module, "input")
        hooks.append(module.register_forward_pre_hook(calibrate_input_hook))
    layers = get_modules(network)

    # 2. Layers that run as one share their global scales, of weights and of inputs.
    for base_name in ("weight", "input"):
        attached = [getattr(layer, f"{base_name}_observer") for layer in (network.gate, network.up)]
        Observer.fuse(attached)

    # 3. Weights are observed once, inputs while samples run.
    observe(layers, "weight")
    with torch.no_grad():
        for _ in range(8):
            network(torch.randn(1, 32, 64))
    for hook in hooks:
        hook.remove()

    # 4. Read what was found; the observers are no longer needed.
    tokens = get_observer_token_count(network)
    update_qparams(layers, ("weight", "input"))
    network.apply(freeze_module_quantization)
    for name, layer in network.named_children():
        scales = layer.get_parameter("weight_scale")
        print(
            f"{name}: {tokens[name]} tokens, weight scales {tuple(scales.shape)}, "
            f"weight global scale {layer.get_parameter('weight_global_scale').item():.1f}, "
            f"input global scale {layer.get_parameter('input_global_scale').item():.1f}"
        )


if __name__ == "__main__":
    main()
