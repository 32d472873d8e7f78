"""The version of vexport, and the version of vLLM that vexport's tables describe."""

__version__ = "0.1.0"

# Major and minor number of a vLLM: (0, 32).
Version = tuple[int, int]
# The version of the tables in `vexport/architectures`, the checks and the CPU emulation.
PINNED: Version = (0, 32)


def short_version(version: Version = PINNED) -> str:
    """Return a version as text, such as 0.32."""
    return ".".join(map(str, version))
