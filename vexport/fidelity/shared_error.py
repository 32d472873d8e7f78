"""Rows that GPTQ drove far from the source's, told from rows with a fault by where their errors go.

All rows of a layer are rounded for one input. Where one column of it outweighs all others, as the massive
activations of a first token do, every row corrects the error of that column by the same combination of the
others: the errors of all rows share a few directions. A row with a large weight in that column needs so much
of the correction that its codes run into the ends of the grid; it ends with an error of several times its
weight, and still answers as it should. A fault does not know these directions.

On SmolLM2-135M two down projections have such rows: -12 to 7 dB with GPTQ in W4A16, W3A16, NVFP4 and MXFP4,
of their error 0.16 to 0.9 along eight directions. Where a row is another one's it is at most 0.19 for 99 rows
of 100, where columns are in another order 0.014.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import normalize

DIRECTIONS = 8
LEAST_SHARE = 0.12
# An unrelated error has about chi-square of `DIRECTIONS` / columns along them: more than this by no chance.
LEAST_OF_CHANCE = 64.0
# Rows that show the directions, and one in how many rows of a layer may be such a row.
SHOWN_ROWS = 512
FEWEST_ROWS_FOR_ONE = 64

# The errors (some, in) of the rows of these numbers (some,), which rise.
ErrorsOf = Callable[[torch.Tensor], torch.Tensor]


def unlike_the_others(wrong: torch.Tensor, errors_of: ErrorsOf, columns: int) -> torch.Tensor:
    """Of the rows that are `wrong` (rows,) those whose errors do not go where the other rows' errors go."""
    rows, others = wrong.nonzero()[:, 0], (~wrong).nonzero()[:, 0]
    if not len(rows) or len(rows) * FEWEST_ROWS_FOR_ONE > len(wrong):
        return wrong
    picked = others[torch.linspace(0, len(others) - 1, min(len(others), SHOWN_ROWS)).to(torch.int64)]
    shares = _along(errors_of(picked), errors_of(rows))
    unlike = wrong.clone()
    unlike[rows] = (shares < LEAST_SHARE) | (shares * columns < LEAST_OF_CHANCE)
    return unlike


def _along(shown: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """How much of the power of each error (rows, in) lies along the main directions of those `shown`."""
    shown = normalize(shown, dim=1)
    _, combinations = torch.linalg.eigh(shown @ shown.T)
    directions = normalize(combinations[:, -DIRECTIONS:].T @ shown, dim=1)
    return (normalize(errors, dim=1) @ directions.T).square().sum(dim=1)
