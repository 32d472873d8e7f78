"""Compiled (numba) searches for the ranges and block scales of weights, on the CPU."""
