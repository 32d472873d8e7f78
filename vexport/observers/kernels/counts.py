"""How often each 16-bit pattern occurs: a search over one large group needs every number only once."""

import numpy as np
import numpy.typing as npt
from numba import prange

from vexport.numerics.arithmetic import (
    Bits,
)
from vexport.numerics.jit import compiled

Counts = npt.NDArray[np.int64]

PATTERNS = 1 << 16


@compiled(parallel=True)
def add_counts(values: Bits, counts: Counts) -> None:
    """Count the 16-bit patterns of flat `values` in `counts` (tasks, PATTERNS), each task in its own row."""
    tasks = counts.shape[0]
    for task in prange(tasks):
        row = counts[task]
        for i in range(task * values.size // tasks, (task + 1) * values.size // tasks):
            row[values[i]] += 1
