"""Measure how fast this machine multiplies matrices. This module does not import torch."""

import math
import time
from functools import cache

import numpy as np

# The shape of a layer's product: tokens of a sample, and input and output channels.
TOKENS, COLUMNS = 256, 1024
# Seconds for the measurement.
SECONDS = 0.2


@cache
def cpu_flops() -> float:
    """Return the float32 operations that this machine's CPUs can do in a second.

    The fastest product counts: a mean would vary by a factor of ten if other processes run for a
    part of the measurement.
    """
    inputs = np.ones((TOKENS, COLUMNS), dtype=np.float32)
    weight = np.ones((COLUMNS, COLUMNS), dtype=np.float32)
    output = inputs @ weight  # starts the threads
    fastest = math.inf
    end = time.perf_counter() + SECONDS
    while (begun := time.perf_counter()) < end or fastest == math.inf:
        np.matmul(inputs, weight, out=output)
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * TOKENS * COLUMNS * COLUMNS / fastest
