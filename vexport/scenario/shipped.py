"""The files of the demo: in a checkout next to the package, in an installation inside it.

Also run by scripts/build_backend.py, so that it imports nothing but the standard library.
"""

from collections.abc import Iterator
from pathlib import Path

# In scenarios/.
PATTERNS = (
    "demo-*.yaml",
    "demo/README.md",
    "demo/calibration.jsonl",
    "demo/model/*",
    "demo/model-x8/*",
    "demo/model-x16/*",
    "demo/tasks/*",
)
PACKAGE = Path(__file__).resolve().parent.parent


def scenarios() -> Path:
    """The folder that the files are in."""
    installed = PACKAGE / "scenarios"
    return installed if installed.is_dir() else PACKAGE.parent / "scenarios"


def demo_files(root: Path) -> Iterator[Path]:
    """The demo's files in the folder `root`, relative to it."""
    for pattern in PATTERNS:
        yield from (path.relative_to(root) for path in sorted(root.glob(pattern)) if path.is_file())
