"""Kernels of each format that turn a weight's rows into stored bytes, without torch."""
