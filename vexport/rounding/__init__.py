"""Rounding of weights so that a layer's output changes least, from what calibration shows of its input."""
