"""Quantize checkpoints to compressed-tensors for vLLM, and test that they load accurately."""

from vexport.version import __version__

__all__ = ["__version__"]
