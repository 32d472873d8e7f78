"""Looks at the numbers that a checkpoint stores: scales, codes, casts, ranges."""
