"""Find the files of the demo: next to the package in a checkout, inside it in an installation.

scripts/build_backend.py also runs this module, so it imports only the standard library.
"""

from collections.abc import Iterator
from pathlib import Path

# Relative to scenarios/.
PATTERNS = (
    "demo-*.yaml",
    "demo/README.md",
    "demo/calibration.jsonl",
    "demo/model/*",
    "demo/model-x8/*",
    "demo/model-x16/*",
    "demo/model-sight/*",
    "demo/tasks/*",
)
PACKAGE = Path(__file__).resolve().parent.parent


def scenarios() -> Path:
    """Return the folder with the demo's files."""
    installed = PACKAGE / "scenarios"
    return installed if installed.is_dir() else PACKAGE.parent / "scenarios"


def demo_files(root: Path) -> Iterator[Path]:
    """Yield the paths of the demo's files below `root`, relative to `root`."""
    for pattern in PATTERNS:
        yield from (path.relative_to(root) for path in sorted(root.glob(pattern)) if path.is_file())
