"""Writes golden values of brevitas' Qronos for the tests of refit.

Run in brevitas' environment: `.venv-qronos/bin/python scripts/bench/golden_qronos.py`
(scripts/bench/setup-qronos). Writes tests/rounding/golden/qronos.safetensors: a weight, the second moments of
the inputs that its layer gets in the source (X) and in the quantized model (X~), the scales of 4-bit groups,
the damping, and what Qronos makes of the weight.
"""

from pathlib import Path

import torch
from brevitas.graph.qronos import Qronos
from safetensors.torch import save_file

FILE = Path(__file__).parents[2] / "tests" / "rounding" / "golden" / "qronos.safetensors"
ROWS, COLUMNS, TOKENS, GROUP, DIRECTIONS = 48, 64, 1024, 16, 24
# Of H's largest eigenvalue: brevitas' unit.
DAMPING = 1e-3
HIGHEST = 7


def inputs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """X and X~ (tokens, columns): X hangs on a few directions, X~ is X with the errors of earlier layers."""
    mixing = torch.randn(DIRECTIONS, COLUMNS, generator=generator) / 5
    source = torch.randn(TOKENS, DIRECTIONS, generator=generator) @ mixing
    source += torch.randn(TOKENS, COLUMNS, generator=generator) * 0.3
    mixed = source @ (torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.01)
    return source, source + mixed + torch.randn(TOKENS, COLUMNS, generator=generator) * 0.1


class Quantizer(torch.nn.Module):
    """What Qronos asks of a layer's quantizer."""

    requires_quant_input = False


class FixedScales(Qronos):  # type: ignore[misc]
    """Qronos on scales that do not follow the weight."""

    scales: torch.Tensor

    def quantized(self) -> torch.Tensor:
        """The layer's weight, every value rounded to nearest."""
        scales = self.scales.repeat_interleave(GROUP, dim=1)
        codes = torch.round(self.layer.weight.data / scales).clamp(-HIGHEST - 1, HIGHEST)
        return codes * scales

    def get_quant_weights(
        self, i: int, i1: int, permutation_list: list[torch.Tensor], with_quant_history: bool = False
    ) -> torch.Tensor:
        """(1, rows): column `i1 + i` in the order of rounding; or (1, rows, columns): those before it."""
        (order,) = permutation_list
        columns = order[: i1 + i] if with_quant_history else order[i1 + i]
        return self.quantized()[None][:, :, columns]


def main() -> None:
    """Write the file."""
    generator = torch.Generator().manual_seed(0)
    source, quantized = inputs(generator)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = weight.clone()
    layer.weight_quant = Quantizer()
    qronos = FixedScales(
        layer, "layer", act_order=True, len_parallel_layers=1, create_weight_orig=True, alpha=DAMPING
    )
    qronos.scales = weight.reshape(ROWS, -1, GROUP).abs().amax(-1) / HIGHEST
    qronos.H[0], qronos.G[0] = quantized.T @ quantized / TOKENS, source.T @ quantized / TOKENS
    hessian, cross = qronos.H[0].clone(), qronos.G[0].T.clone()
    largest = torch.linalg.eigvalsh(hessian)[-1]
    qronos.single_layer_update()
    found = {
        "weight": weight,
        "hessian": hessian,
        "cross": cross,
        "scale": qronos.scales,
        "damping": DAMPING * largest,
        "rounded": qronos.quantized(),
    }
    save_file({name: value.contiguous() for name, value in found.items()}, FILE)


if __name__ == "__main__":
    main()
