"""Kernels for the CPU, compiled by numba at their first use and cached; no module here loads torch."""
