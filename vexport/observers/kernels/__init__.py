"""Searches for the ranges and block scales of weights on the CPU, compiled by numba."""
