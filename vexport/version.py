"""The version of vexport, and the version of vLLM that vexport's tables describe."""

import re

__version__ = "1.0.0"

# Major and minor number of a vLLM: (0, 32).
Version = tuple[int, int]
# The version of the tables in `vexport/architectures`, the checks and the CPU emulation.
PINNED: Version = (0, 32)


def parse_version(value: str | Version) -> Version:
    """Return the major and minor number of a version: `0.30`, `v0.30.1` or (0, 30).

    Raises ValueError for any other value.
    """
    parts = value if isinstance(value, tuple) else ()
    text = value if isinstance(value, str) else ".".join(map(str, parts))
    match = re.match(r"v?([0-9]{1,9})\.([0-9]{1,9})(?:\.|$)", text)
    if match is None:
        raise ValueError(f"{value!r} is not a version such as 0.30.")
    return int(match[1]), int(match[2])


def short_version(version: Version = PINNED) -> str:
    """Return a version as text, such as 0.32."""
    return ".".join(map(str, version))
