"""Find the user's folder for caches."""

import os
from pathlib import Path


def user_caches() -> list[Path]:
    """Return the folder for vexport's caches, or an empty list if the user has no home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return [Path(named) / "vexport"]
    try:
        return [Path.home() / ".cache" / "vexport"]
    except RuntimeError:
        return []
