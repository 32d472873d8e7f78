"""Writes the demo's scenarios with their model, calibration data and tasks where a person can run them."""

import shutil
from pathlib import Path

from vexport.demo.shipped import demo_files, scenarios
from vexport.errors import EnvironmentFault
from vexport.files import new_directory

FIRST = "demo-nvfp4.yaml"


def write_demo(folder: Path, *, overwrite: bool) -> Path:
    """Write the demo into `folder`, whole or not at all, and return its first scenario.

    InputError where the folder is not empty, unless `overwrite` and a demo is in it; EnvironmentFault where
    this installation of vexport has lost its files.
    """
    root = scenarios()
    files = list(demo_files(root))
    if Path(FIRST) not in files:
        fix = "install vexport again, or run from a checkout"
        raise EnvironmentFault(str(root), got=f"no {FIRST}", need="the files of the demo", fix=fix)
    with new_directory(folder, overwrite=overwrite, mark=FIRST) as new:
        for file in files:
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, new / file)
    return folder / FIRST
