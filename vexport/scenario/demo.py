"""Writes the demo's scenarios with their model, calibration data and tasks where a person can run them."""

import shutil
import tempfile
from pathlib import Path

from vexport.errors import EnvironmentFault
from vexport.outputs.replaceable import FolderKind, refuse_others
from vexport.scenario.shipped import demo_files, scenarios

FIRST = "demo-nvfp4.yaml"
MARK = ".vexport-demo"
MARK_TEXT = "Written by `vexport demo`, which replaces the demo's files here with --overwrite.\n"
KIND = FolderKind(
    name="a demo that vexport wrote", mark=MARK, text=MARK_TEXT, entries=frozenset({"demo", "demo-*.yaml"})
)


def write_demo(folder: Path, *, overwrite: bool) -> Path:
    """Write the demo into `folder`, and return its first scenario. A new folder appears whole or not at all.

    InputError where the folder is not empty, unless `overwrite` and nothing but a demo is in it;
    EnvironmentFault where this installation of vexport has lost its files.
    """
    root = scenarios()
    files = list(demo_files(root))
    if Path(FIRST) not in files:
        fix = "install vexport again, or run from a checkout"
        raise EnvironmentFault(str(root), got="the files of the demo are missing", need="", fix=fix)
    KIND.require_replaceable(folder, overwrite=overwrite)
    inside = [path.relative_to(folder) for path in sorted((folder / "demo").rglob("*")) if path.is_file()]
    refuse_others(folder, [str(path) for path in inside if path not in files])
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}.") as temporary:
        new = Path(temporary) / folder.name
        KIND.begin(new)
        for file in files:
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, new / file)
        _move(new, folder)
    return folder / FIRST


def _move(new: Path, folder: Path) -> None:
    if not folder.exists():
        new.rename(folder)
        return
    KIND.begin(folder)
    for entry in new.iterdir():
        entry.replace(folder / entry.name)
