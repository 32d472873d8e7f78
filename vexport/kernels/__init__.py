"""Kernels that pack weights, one file a storage format, compiled by numba; no module here loads torch."""
