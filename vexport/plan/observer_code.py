"""Find where the code of an observer `package.module:Class` is, without running any of it.

Scenarios and recipes may name an observer, and may come from other people. Without
--trust-remote-code, vexport imports an observer only if its file and the files of its parent
packages are in a trusted place:

- a folder of installed packages (site-packages) of this interpreter
- a project installed as editable
- a folder or archive that PYTHONPATH names

The current folder, the folder of the scenario or recipe, and everything in them are not trusted.
This holds even if PYTHONPATH or an editable install names them. Installed packages inside them, as
in a virtual environment in a project's folder, are trusted. Symbolic links are followed: neither
the link nor its target may be in such a folder. The standard library is not trusted: it contains no
observers, and importing some of its modules has side effects.
"""

import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vexport.records.observer_names import CLASS_SEPARATOR

PACKAGE = Path(__file__).resolve().parent.parent


def untrusted_place(name: str, folders: Sequence[Path]) -> str | None:
    """Return the first file in an untrusted place that importing `package.module:Class` would run.

    Returns None if all files are trusted, or if there is no such module: importing it then fails.
    `folders` are not trusted, in addition to the current folder.
    """
    module = name.partition(CLASS_SEPARATOR)[0]
    untrusted = [
        *_spellings(Path.cwd()),
        *(each for folder in folders for each in _spellings(folder)),
    ]
    path: list[str] | None = None
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:number]), path)
        if spec is None:
            return None
        if spec.origin is not None and not _is_trusted(spec.origin, untrusted):
            return spec.origin
        if spec.submodule_search_locations is None:
            return None
        path = _locations(spec)
    return None


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Return the spec that importing `name` would use, without importing its parents."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None


def _locations(spec: ModuleSpec) -> list[str]:
    """Return the folders of a package.

    For a namespace package, this reads Python's private list. Iterating over the public attribute
    would need the parent package to be imported.
    """
    locations = spec.submodule_search_locations
    return [*getattr(locations, "_path", locations or ())]


def _is_trusted(origin: str, untrusted: Sequence[Path]) -> bool:
    """Return True if a file is in a trusted place.

    Returns False for built-in and frozen modules, because their `origin` is not a file.
    """
    file = Path(origin)
    if not file.is_absolute():
        return False
    if _is_in(file.resolve(), [PACKAGE]):
        return True
    installed = [spelling for folder in _site_packages() for spelling in _spellings(folder)]
    packages = [root for root in installed if _is_in(file, [root])]
    if packages:
        # Installed files are trusted, with two exceptions: files in an untrusted folder that is
        # site-packages or inside it (for example if the command is called there), and links from
        # site-packages into any other untrusted folder.
        untrusted_packages = [folder for folder in untrusted if _is_in(folder, packages)]
        other_untrusted = [folder for folder in untrusted if folder not in untrusted_packages]
        is_link = not _is_in(file.resolve(), installed)
        return not _is_untrusted(file, untrusted_packages) and not (
            is_link and _is_in(file.resolve(), other_untrusted)
        )
    trusted = [
        spelling
        for folder in (*_python_path(), *_editable_projects())
        for spelling in _spellings(folder)
    ]
    return _is_in(file, trusted) and not _is_untrusted(file, untrusted)


def _is_untrusted(file: Path, folders: Sequence[Path]) -> bool:
    return _is_in(file, folders) or _is_in(file.resolve(), folders)


def _is_in(file: Path, folders: Sequence[Path]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def _spellings(folder: Path) -> tuple[Path, Path]:
    """Return a folder's absolute path without `..`, and the same with links followed."""
    return Path(os.path.abspath(folder)), folder.resolve()  # noqa: PTH100 (links stay what they are)


def _site_packages() -> list[Path]:
    """Return the folders of installed packages of this interpreter."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    paths = sysconfig.get_paths()
    names = (*site.getsitepackages(), *user, paths["purelib"], paths["platlib"])
    return [Path(name) for name in dict.fromkeys(names)]


def _python_path() -> list[Path]:
    """Return the entries of PYTHONPATH, except empty entries, which mean the current folder."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [Path(entry) for entry in entries if entry]


def _editable_projects() -> Iterator[Path]:
    """Yield the folders of projects that are installed as editable.

    They are found by .pth files and by the metadata of distributions.
    """
    installed = [str(folder) for folder in _site_packages() if folder.is_dir()]
    for folder in installed:
        for file in sorted(Path(folder).glob("*.pth")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            paths = [
                line.strip()
                for line in lines
                if line.strip() and not line.startswith(("import", "#"))
            ]
            yield from (Path(folder) / path for path in paths)
    for distribution in distributions(path=installed):
        if text := distribution.read_text("direct_url.json"):
            yield from _editable_folder(text)


def _editable_folder(text: str) -> Iterator[Path]:
    """Yield the folder of an editable project from its direct_url.json (PEP 610)."""
    try:
        content = json.loads(text)
        is_editable = content["dir_info"]["editable"] is True
        url = urlsplit(content["url"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if is_editable and url.scheme == "file":
        yield Path(unquote(url.path))
