"""Wheels of a package index, and the Python files in them as text: nothing is installed or imported."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

CACHE = Path.home() / ".cache" / "vexport-wheels"
MODELS = "vllm/model_executor/models"


class Wheel:
    """The files of one wheel, fetched with pip unless the cache has it."""

    def __init__(self, package: str, version: str, folder: Path) -> None:
        pattern = f"{package.replace('-', '_')}-{version}-*.whl"
        if not [*folder.glob(pattern)]:
            options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder))
            command = (sys.executable, "-m", "pip", "download", *options, f"{package}=={version}")
            subprocess.run(command, check=True)
        self.archive = zipfile.ZipFile(next(folder.glob(pattern)))

    @cached_property
    def names(self) -> frozenset[str]:
        """The path of every file."""
        return frozenset(self.archive.namelist())

    def text(self, name: str) -> str:
        """A file; empty where this version has none."""
        return self.archive.read(name).decode() if name in self.names else ""

    @cache  # noqa: B019 - a script reads a few wheels and ends
    def tree(self, name: str) -> ast.Module:
        """The syntax tree of a file; empty where this version has none."""
        return ast.parse(self.text(name))

    def below(self, folder: str) -> Iterator[str]:
        """The Python files of a folder and of the folders in it."""
        yield from (name for name in sorted(self.names) if name.startswith(folder) and name.endswith(".py"))

    @property
    def metadata(self) -> str:
        """What the wheel requires."""
        return self.text(next(name for name in self.names if name.endswith(".dist-info/METADATA")))

    def file_of(self, module: str, importer: str) -> str:
        """The file of a module as an import names it in another file; "" for what is not in the wheel."""
        level = len(module) - len(module.lstrip("."))
        parts = importer.split("/")[:-level] if level else []
        path = "/".join([*parts, *filter(None, module.lstrip(".").split("."))])
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.names), "")

    @cache  # noqa: B019
    def classes(self, file: str) -> dict[str, ast.ClassDef]:
        """The classes that a file defines."""
        return {node.name: node for node in self.tree(file).body if isinstance(node, ast.ClassDef)}

    @cache  # noqa: B019
    def imports(self, file: str) -> dict[str, tuple[str, str]]:
        """The names that a file imports from others of the wheel: name -> (file, name there)."""
        found = {}
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom):
                source = self.file_of("." * node.level + (node.module or ""), file)
                found.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
        return {name: place for name, place in found.items() if place[0]}

    @cache  # noqa: B019
    def resolve(self, file: str, name: str) -> tuple[str, str] | None:
        """Where a class that a file names is defined; None for what is no class of the wheel."""
        if name in self.classes(file):
            return file, name
        place = self.imports(file).get(name)
        return self.resolve(*place) if place and place[0].startswith(("vllm/model", MODELS)) else None

    @cache  # noqa: B019
    def named(self, file: str, name: str) -> tuple[tuple[str, str], ...]:
        """The classes of models that the source of a class names, its bases first."""
        node = self.classes(file)[name]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        others = sorted({part.id for part in ast.walk(node) if isinstance(part, ast.Name)})
        places = (self.resolve(file, each) for each in dict.fromkeys([*bases, *others]))
        return tuple(place for place in places if place and place[0].startswith(MODELS))

    def reachable(self, file: str, name: str) -> list[tuple[str, str]]:
        """The classes that a model is made of."""
        found: dict[tuple[str, str], None] = {}
        todo = [(file, name)]
        while todo:
            current = todo.pop()
            if current not in found:
                found[current] = None
                todo.extend(self.named(*current))
        return list(found)

    def attribute(self, file: str, name: str, wanted: str) -> tuple[str, ast.expr] | None:
        """What a class, or else the first of its bases, assigns to an attribute, and the file of that."""
        node = self.classes(file)[name]
        for line in node.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = getattr(line, "value", None)
            if isinstance(target, ast.Name) and target.id == wanted and isinstance(value, ast.expr):
                return file, value
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for place in (self.resolve(file, base) for base in bases):
            if place and (found := self.attribute(*place, wanted)):
                return found
        return None
