"""Select the tests of what changed: `scripts/test --changed`.

Files are compared with the merge base of HEAD and main. On main itself, they are compared with the
upstream branch, or with HEAD without one. Changes that are not committed count.

A module is affected if it changed, or if it imports a changed module. Packages pass an import on:
if `__init__.py` imports a changed module, then the importers of the package are affected, too. So
do helpers of tests. A data file counts as its package. These tests are selected:

- the folder of tests of each package with a changed file, or with a file that imports a changed one
- files of tests that import an affected module
- the tests in `ALWAYS`, or all files directly in `tests/` if a file outside of vexport and the
  tests changed, such as a document
- all tests, if a file in `ALL` changed

Tests with the markers `vllm` and `slow`, and tests that start lm-eval, run only if their own file
changed.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALL = ("pyproject.toml", "scripts/requirements.txt", "tests/conftest.py", "tests/__init__.py")
ALWAYS = ("test_catalog.py", "test_documents.py", "test_layers.py", "test_security.py")
# A module in a text, such as the target of a monkeypatch.
_NAMED = re.compile(r"(?:vexport|tests)(?:\.\w+)+")

# The file of each module, by its dotted name.
Modules = Mapping[str, Path]
# The names that each module imports.
Imports = Mapping[str, frozenset[str]]


def changed_files(root: Path = ROOT) -> frozenset[Path]:
    """Return the files that differ from the base, relative to the repository's root."""
    base = _base_commit(root)
    differing = _git(root, "diff", "--name-only", "--no-renames", base).splitlines()
    untracked = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    return frozenset(map(Path, (*differing, *untracked)))


def _base_commit(root: Path) -> str:
    head = _git(root, "rev-parse", "HEAD")
    main = _git(root, "rev-parse", "main") or _git(root, "rev-parse", "origin/main")
    other = "@{upstream}" if main == head else main
    return _git(root, "merge-base", "HEAD", other) or head


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command, or "" if it fails."""
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def select(changed: Iterable[Path]) -> list[Path]:
    """Return the files and folders of tests to run, relative to the repository's root."""
    changed = set(changed)
    if any(file.as_posix() in ALL for file in changed):
        return [Path("tests")]
    modules = {_name(file): file for folder in ("vexport", "tests") for file in _sources(folder)}
    imports = {name: _imports(file) for name, file in modules.items()}
    names = {_name(file if file.suffix == ".py" else _package(file)) for file in changed}
    direct = {modules[name] for name in _importers(names, imports) if name.startswith("vexport.")}
    folders = {Path("tests", *file.parts[1:2]) for file in changed | direct if len(file.parts) > 2}
    folders = {folder for folder in folders if (ROOT / folder).is_dir()}
    files = {modules[name] for name in _affected(names, imports, modules) if name in modules}
    is_inside = all(file.parts[0] in ("vexport", "tests") for file in changed)
    whole = {file for file in modules.values() if file.parent == Path("tests")}
    files |= {file for file in whole if file.name in ALWAYS or not is_inside}
    tests = {file for file in files if file.name.startswith("test_") and file.parts[0] == "tests"}
    return sorted(folders | {file for file in tests if folders.isdisjoint(file.parents)})


def _sources(folder: str) -> Iterator[Path]:
    return (file.relative_to(ROOT) for file in sorted((ROOT / folder).rglob("*.py")))


def _name(file: Path) -> str:
    """Return the module of a Python file."""
    module = file.parent if file.name == "__init__.py" else file.with_suffix("")
    return ".".join(module.parts)


def _package(file: Path) -> Path:
    """Return the `__init__.py` of the package that has a data file."""
    folders = (folder for folder in file.parents if (ROOT / folder / "__init__.py").exists())
    return next(folders, file.parent) / "__init__.py"


def _affected(changed: set[str], imports: Imports, modules: Modules) -> set[str]:
    """Return the changed modules and their importers."""
    affected = passing = changed
    while passing:
        importers = _importers(passing, imports) - affected
        affected = affected | importers
        passing = {name for name in importers if _passes_on(modules[name])}
    return affected


def _importers(names: set[str], imports: Imports) -> set[str]:
    return {importer for importer, imported in imports.items() if imported & names}


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the names that a file imports or has in its texts, at any depth."""
    names = set[str]()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = _NAMED.fullmatch(node.value)
            parts = found[0].split(".") if found else []
            names |= {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
    return frozenset(names)


def _passes_on(file: Path) -> bool:
    """Return whether the importers of an affected module are affected, too."""
    is_helper = file.parts[0] == "tests" and not file.name.startswith(("test_", "conftest"))
    return is_helper or file.name == "__init__.py"


if __name__ == "__main__":
    print(*select(changed_files()))
