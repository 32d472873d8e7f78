"""vexport: quantized compressed-tensors checkpoints that vLLM is shown to load, accurately
enough.
"""

from vexport.version import __version__

__all__ = ["__version__"]
