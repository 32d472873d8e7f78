"""Calibrate a torch.nn.Module with vexport's observers, without the command line.

    python scenarios/observers_example.py

A small network gets NVFP4 weights and inputs, and the script prints its quantization parameters. A
serving engine runs the first two layers as a single layer. They therefore share their global
scales, like q, k and v or gate and up in a language model.
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
    """Gated MLP of a language model: the product of gate and up, then down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 128, bias=False)
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output for states of shape (batch, tokens, 64), in the same shape."""
        gated: torch.Tensor = torch.nn.functional.silu(self.gate(states)) * self.up(states)
        down: torch.Tensor = self.down(gated)
        return down


def main() -> None:
    """Attach observers, run the network, print the quantization parameters and freeze them."""
    torch.manual_seed(0)
    network = GatedNetwork()

    # 1. Set the scheme of each layer and attach its observers.
    hooks = []
    for module in (network.gate, network.up, network.down):
        module.quantization_scheme = preset_name_to_scheme("NVFP4", ["Linear"])
        initialize_observer(module, "weight")
        initialize_observer(module, "input")
        hooks.append(module.register_forward_pre_hook(calibrate_input_hook))
    layers = get_modules(network)

    # 2. Fused layers share the global scales of their weights and of their inputs.
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

    # 4. Store the scales in the layers. The observers are no longer needed.
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
