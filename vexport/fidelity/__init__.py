"""Comparison of a quantized checkpoint with its source."""
