"""Stochastic rounding: up or down with the probability that keeps the expected value."""

from dataclasses import replace

import torch

from vexport.quantize.gptq import Grid, round_nearest


def round_stochastic(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Round a weight (out, in), float32, to numbers of the grid after adding noise of one step."""
    generator = torch.Generator(weight.device).manual_seed(0)
    noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
    steps = grid.scale.repeat_interleave(grid.width, dim=1)[:, : weight.shape[1]]
    return round_nearest(weight + noise * steps, replace(grid))
