"""Moments of a layer's input: sums of products over tokens, which decide how weights are rounded.

GPTQ and refits need these sums. They are computed on the device of the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vexport.numerics.products import BLOCK_ROWS, add_product, exact_products
from vexport.numerics.ranks import all_reduce


@dataclass(slots=True, kw_only=True)
class Moments:
    """Sums over tokens in float32, from which weights are rounded.

    `hessian` (in, in) is X~^T V X~. X~ (tokens, in) is the input in the quantized stream after the
    layer's input rounding. V is the weight of each token, 1 by default. `add` fills only the lower
    triangle of `hessian`, and `complete` makes the matrix symmetric.

    A refit also needs one of two other sums. `drift` (in, in) is X~^T V (X - X~) with the input X
    of the source's layer for the same tokens. `targets` (in, out) is X~^T V Y with the output Y of
    the source's layer, which has no bias. It takes fewer operations than `drift` if the layer has
    fewer outputs than inputs. A sum that is not needed is None.
    """

    hessian: torch.Tensor
    drift: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    tokens: int = 0

    @classmethod
    def zeros(
        cls,
        columns: int,
        *,
        drift: bool = False,
        outputs: int = 0,
        device: str | torch.device = "cpu",
    ) -> "Moments":
        """Return the moments of no tokens, with `targets` if there are `outputs`."""
        zero = torch.zeros(columns, columns, device=device)
        return cls(
            hessian=zero,
            drift=zero.clone() if drift else None,
            targets=zero.new_zeros(columns, outputs) if outputs else None,
        )

    def add(
        self,
        quantized: torch.Tensor,
        source: torch.Tensor | None,
        *,
        weights: torch.Tensor | None = None,
        share: float | None = None,
    ) -> None:
        """Add the same tokens of both streams: `quantized` (..., in), and `source` (..., in) for
        `drift` or (..., out) for `targets`.

        `weights` (tokens,) float32 contains powers of two. `share` is a weight for all tokens of
        the call. Tokens added with a `share` are not counted in `tokens`.
        """
        rows = _wide(quantized.reshape(-1, quantized.shape[-1]))
        weighed = rows if weights is None else rows * weights[:, None].to(rows.dtype)
        alpha = 1.0 if share is None else share
        with exact_products(quantized.dtype):
            add_product(self.hessian, weighed, rows, alpha=alpha, lower=True)
            if self.drift is not None or self.targets is not None:
                assert source is not None
                self._add_source(weighed, rows, source.reshape(-1, source.shape[-1]), alpha)
        if share is None:
            self.tokens += len(rows)

    def _add_source(
        self, weighed: torch.Tensor, rows: torch.Tensor, source: torch.Tensor, alpha: float
    ) -> None:
        of_source = _wide(source).to(rows.dtype)
        if self.targets is not None:
            add_product(self.targets, weighed, of_source, alpha=alpha)
        if self.drift is not None:
            add_product(self.drift, weighed, of_source - rows, alpha=alpha)

    def all_reduce(self) -> None:
        """Sum the moments over all ranks. Every rank must call this."""
        for sums in (self.hessian, self.drift, self.targets):
            if sums is not None:
                all_reduce(sums)
        tokens = torch.tensor(self.tokens, device=self.hessian.device)
        all_reduce(tokens)
        self.tokens = int(tokens)

    def complete(self) -> "Moments":
        """Fill the upper triangle of `hessian` in place, after all tokens were added."""
        for first, last in _blocks(self.hessian):
            self.hessian[:first, first:last] = self.hessian[first:last, :first].T
            # Both triangles of a block were computed, and their sums may differ in the last bits.
            block = self.hessian[first:last, first:last]
            block.copy_(block.tril() + block.tril(-1).T)
        return self


def _blocks(matrix: torch.Tensor) -> Iterator[tuple[int, int]]:
    for first in range(0, len(matrix), BLOCK_ROWS):
        yield first, min(first + BLOCK_ROWS, len(matrix))


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return float16 as float32, because a float16 value times a token's weight can overflow."""
    return values if values.dtype == torch.bfloat16 else values.to(torch.float32)
