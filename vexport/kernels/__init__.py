"""Kernels for the CPU, compiled by numba at their first use and cached; no module here loads torch."""

from vexport.kernels.cache import use_cache

use_cache()
