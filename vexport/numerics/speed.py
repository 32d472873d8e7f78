"""Measure how fast this machine multiplies matrices. This module does not import torch."""

import time
from functools import cache

import numpy as np

# The shape of a layer's product: tokens of a sample, and input and output channels.
TOKENS, COLUMNS = 256, 1024
# Seconds for the measurement.
SECONDS = 0.2


@cache
def cpu_flops() -> float:
    """Return the float32 operations that this machine's CPUs do in a second at present.

    Other processes that use the CPUs count, because they slow down calibration, too.
    """
    inputs = np.ones((TOKENS, COLUMNS), dtype=np.float32)
    weight = np.ones((COLUMNS, COLUMNS), dtype=np.float32)
    output = inputs @ weight  # starts the threads
    products = 0
    begun = time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < SECONDS or not products:
        np.matmul(inputs, weight, out=output)
        products += 1
    return 2 * TOKENS * COLUMNS * COLUMNS * products / elapsed
