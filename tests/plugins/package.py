"""Writes an installed package with an observer and calibration data, from the example of the docs."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "vexport" / "docs" / "observers.md"


def write_package(folder: Path) -> Path:
    """The package of docs/observers.md, as pip would install it into `folder`."""
    section = DOCS.read_text(encoding="utf-8").partition(
        "## Observers, roundings and data of other packages"
    )[2]
    points, code = (re.search(rf"```{kind}\n(.+?)```", section, re.DOTALL) for kind in ("toml", "python"))
    assert points is not None
    assert code is not None
    (folder / "my_package.py").write_text(code[1])
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    text = points[1].replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(text)
    return folder
