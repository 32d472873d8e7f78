"""Keeps compiled kernels in a folder that is named by a digest of all kernels' sources.

Numba looks at the file of a function alone: code that calls a function of another file would stay as it is
when that file changes.
"""

import hashlib
import os
from pathlib import Path

import numba

PACKAGE = Path(__file__).resolve().parent.parent
KERNEL_ROOMS = ("numerics", "formats/packing", "observers/kernels", "rounding")
FOLDERS = tuple(PACKAGE / folder for folder in KERNEL_ROOMS)


def sources_digest() -> str:
    """SHA-256, shortened to 16 digits, of the sources of all kernels."""
    whole = hashlib.sha256()
    for file in sorted(file for folder in FOLDERS for file in folder.glob("*.py")):
        whole.update(
            f"{file.relative_to(PACKAGE)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return whole.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Below NUMBA_CACHE_DIR, the package, or the user's cache, whichever is writable; None where none is."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    own = PACKAGE / "numerics" / "__pycache__"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vexport"
    for folder in [Path(given)] if given else [own, home]:
        kept = folder / f"kernels-{sources_digest()}"
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(kept, os.W_OK):
            return kept
    return None


def use_cache() -> None:
    """Make numba keep what it compiles from here on in `cache_folder`; its own choice where that is None."""
    folder = cache_folder()
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
