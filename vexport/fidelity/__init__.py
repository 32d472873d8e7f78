"""Comparison of a quantized checkpoint with the one that it was made from."""
