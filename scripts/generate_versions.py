"""Write the features of vLLM versions to vexport/architectures/generated/versions/VERSION.json.

The types of their engine arguments go to generated/engine_arguments/VERSION.json.

    PYTHONPATH=. .venv/bin/python scripts/generate_versions.py 0.33.0 [0.31.0 ...]

The wheels of that version and of `PINNED` are downloaded into a cache and read as text. Only
literals are read: widths, and names of methods. For model classes they are the fused layers, and
whether the embedding table is quantized. Entries of classes that are the same in `PINNED` are left
out. Only the choice of a class for linear layers is executed, for each capability (`selection.py`).
"""

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from engine_arguments import engine_types
from selection import selected_classes
from tables import FOLDER, embedding, write_table

from vexport.architectures import architecture_table
from vexport.formats import FP8, INT4, PACKED
from vexport.formats.arguments import QuantArgs, SchemeArgs
from vexport.formats.base import Format
from vexport.formats.schemes import Scheme, all_schemes, get_scheme

CACHE = Path.home() / ".cache" / "vexport-wheels"
MODELS = "vllm/model_executor/models"
QUANTIZATION = "vllm/model_executor/layers/quantization"
CT = f"{QUANTIZATION}/compressed_tensors"
REGISTRIES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
Entry = dict[str, object]


class Wheel:
    """Python files of a vLLM version as text. pip downloads the wheel if it is not in the cache."""

    def __init__(self, version: str) -> None:
        pattern = f"vllm-{version}-*.whl"
        if not [*CACHE.glob(pattern)]:
            options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(CACHE))
            subprocess.run(
                (sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"), check=True
            )
        self.archive = zipfile.ZipFile(next(CACHE.glob(pattern)))

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.archive.namelist())

    def text(self, name: str) -> str:
        """Return the text of a file. It is empty if this version does not have the file."""
        return self.archive.read(name).decode() if name in self.names else ""

    @cache  # noqa: B019 - a script reads a few wheels and ends
    def tree(self, name: str) -> ast.Module:
        return ast.parse(self.text(name))

    def file_of(self, module: str, importer: str) -> str:
        """Return the file of an imported module, or "" if it is not in the wheel."""
        level = len(module) - len(module.lstrip("."))
        parts = importer.split("/")[:-level] if level else []
        path = "/".join([*parts, *filter(None, module.lstrip(".").split("."))])
        return next(
            (name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.names), ""
        )

    @cache  # noqa: B019
    def classes(self, file: str) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree(file).body if isinstance(node, ast.ClassDef)}

    @cache  # noqa: B019
    def imports(self, file: str) -> dict[str, tuple[str, str]]:
        """Return the names that a file imports from the wheel: name -> (file, name there)."""
        found = {}
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom):
                source = self.file_of("." * node.level + (node.module or ""), file)
                found.update(
                    {alias.asname or alias.name: (source, alias.name) for alias in node.names}
                )
        return {name: place for name, place in found.items() if place[0]}

    @cache  # noqa: B019
    def resolve(self, file: str, name: str) -> tuple[str, str] | None:
        """Return the file and name of a class's definition, or None if it is not in the wheel."""
        if name in self.classes(file):
            return file, name
        place = self.imports(file).get(name)
        return (
            self.resolve(*place) if place and place[0].startswith(("vllm/model", MODELS)) else None
        )

    @cache  # noqa: B019
    def named(self, file: str, name: str) -> tuple[tuple[str, str], ...]:
        """Return the model classes that the source of a class names, its bases first."""
        node = self.classes(file)[name]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        others = sorted({part.id for part in ast.walk(node) if isinstance(part, ast.Name)})
        places = (self.resolve(file, each) for each in dict.fromkeys([*bases, *others]))
        return tuple(place for place in places if place and place[0].startswith(MODELS))

    def reachable(self, file: str, name: str) -> list[tuple[str, str]]:
        """Return the classes that a model consists of."""
        found: dict[tuple[str, str], None] = {}
        todo = [(file, name)]
        while todo:
            current = todo.pop()
            if current not in found:
                found[current] = None
                todo.extend(self.named(*current))
        return list(found)

    def attribute(self, file: str, name: str, wanted: str) -> tuple[str, ast.expr] | None:
        """Return the file and the value of a class's attribute, with inherited attributes."""
        node = self.classes(file)[name]
        if (value := assigned(node.body, wanted)) is not None:
            return file, value
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for place in (self.resolve(file, base) for base in bases):
            if place and (found := self.attribute(*place, wanted)):
                return found
        return None


def assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """Return the value that a module or class assigns to a name."""
    for line in body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if (
            isinstance(line, ast.Assign | ast.AnnAssign)
            and isinstance(target, ast.Name)
            and target.id == name
        ):
            return line.value
    return None


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    pinned = model_classes(Wheel(architecture_table().vllm))
    for version in sys.argv[1:]:
        wheel = Wheel(version)
        classes, minor = model_classes(wheel), version.rpartition(".")[0]
        write_engine_types(wheel, version)
        changed = {
            name: entry
            for name, entry in classes.items()
            if name in pinned and entry != pinned[name]
        }
        entry: Entry = {"vllm": version, **facts(wheel)}
        entry["absent"] = sorted(pinned.keys() - classes.keys())
        entry["added"] = {name: classes[name] for name in sorted(classes.keys() - pinned.keys())}
        entry["classes"] = changed
        target = FOLDER / "versions" / f"{minor}.json"
        if target.is_file():
            # Methods that were compared by scripts/version_agreement.py.
            stored = json.loads(target.read_text())
            entry["agreeing_methods"] = stored.get("agreeing_methods", [])
        write_table(target, entry, "schemes", "added", "classes")
        print(
            f"{minor}: {len(classes)} classes, {len(changed)} unlike {architecture_table().vllm}'s"
        )


def write_engine_types(wheel: Wheel, version: str) -> None:
    """Write the types of the engine arguments, with a line for each config class."""
    target = FOLDER / "engine_arguments" / f"{version.rpartition('.')[0]}.json"
    target.parent.mkdir(exist_ok=True)
    write_table(target, {"vllm": version, "classes": engine_types(wheel)}, "classes")


def facts(wheel: Wheel) -> Entry:
    """Return the facts that do not depend on a model class."""
    metadata = next(name for name in wheel.names if name.endswith(".dist-info/METADATA"))
    required = re.search(r"compressed-tensors==([\w.]+)", wheel.text(metadata))
    assert required is not None
    return {
        "compressed_tensors": required[1],
        "schemes": selected_classes(wheel, used_schemes(), minimums(wheel)),
        "asymmetric_widths": asymmetric_widths(wheel),
        "methods": methods(wheel),
    }


def used_schemes() -> list[Scheme]:
    """Return the presets, and schemes that only other producers write."""
    weights = {name: get_scheme(name).args.weights for name in ("FP8_DYNAMIC", "W4A16", "W4A8")}
    tokens = get_scheme("W4A8").args.input_activations
    assert tokens is not None
    return [
        *all_schemes(),
        _scheme(FP8, weights["FP8_DYNAMIC"], None),
        _scheme(INT4, weights["W4A8"], tokens),
        _scheme(PACKED, weights["W4A16"], replace(tokens, num_bits=4)),
    ]


def _scheme(storage: Format, weights: QuantArgs, inputs: QuantArgs | None) -> Scheme:
    args = SchemeArgs(weights=weights, input_activations=inputs)
    return Scheme(name=storage.name, args=args, format=storage)


def minimums(wheel: Wheel) -> dict[str, int]:
    """Return the minimum compute capability of each class for linear layers."""
    found = {}
    for file in sorted(wheel.names):
        for name in (
            wheel.classes(file)
            if file.startswith(f"{CT}/schemes/") and file.endswith(".py")
            else ()
        ):
            if (least := returned(wheel, file, name)) is not None:
                found[name] = least
    return dict(sorted(found.items()))


def returned(wheel: Wheel, file: str, name: str) -> int | None:
    """Return the number from get_min_capability of a class or its bases, or None if it has none."""
    node = wheel.classes(file)[name]
    if "def get_min_capability(" in (text := ast.unparse(node)):
        number = re.search(r"def get_min_capability\(.*?\n\s+return (\d+)", text, re.DOTALL)
        return int(number[1]) if number else None
    for base in node.bases:
        place = wheel.imports(file).get(ast.unparse(base), (file, ast.unparse(base)))
        if place[1] in wheel.classes(place[0]) and place != (file, name):
            return returned(wheel, *place)
    return None


def asymmetric_widths(wheel: Wheel) -> list[int]:
    """Return the bits of packed integers with zero points."""
    body = wheel.tree(f"{CT}/schemes/compressed_tensors_wNa16.py").body
    widths = assigned(body, "WNA16_ZP_SUPPORTED_TYPES_MAP")
    assert isinstance(widths, ast.Dict)
    return [ast.literal_eval(key) for key in widths.keys if key is not None]


def methods(wheel: Wheel) -> list[str]:
    literal = assigned(wheel.tree(f"{QUANTIZATION}/__init__.py").body, "QuantizationMethods")
    assert literal is not None
    return [each.value for each in ast.walk(literal) if isinstance(each, ast.Constant)]  # type: ignore[misc]


def model_classes(wheel: Wheel) -> dict[str, Entry]:
    """Return the fused layers of each registered class, and how it builds its embedding table."""
    found = {}
    for name, (module, defined) in sorted(registered(wheel).items()):
        file = wheel.file_of(module if "." in module else f".{module}", f"{MODELS}/registry.py")
        place = wheel.resolve(file, defined)
        if place is not None:
            read: Entry = {
                "fused": packed(wheel, *place),
                "embedding": embedding(calls_in(wheel, *place)),
            }
            found[name] = {key: value for key, value in read.items() if value}
    return found


def registered(wheel: Wheel) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name in REGISTRIES:
        value = assigned(wheel.tree(f"{MODELS}/registry.py").body, name)
        assert value is not None
        found |= ast.literal_eval(value)
    return found


def packed(wheel: Wheel, file: str, name: str) -> Mapping[str, list[str]]:
    """Return a class's packed_modules_mapping. It is empty if the code computes it."""
    found = wheel.attribute(file, name, "packed_modules_mapping")
    return evaluated(wheel, *found) if found else {}


def evaluated(wheel: Wheel, file: str, value: ast.expr) -> Mapping[str, list[str]]:
    """Return the value of a literal, of another class's mapping, or of two joined mappings."""
    if isinstance(value, ast.BinOp):
        return {**evaluated(wheel, file, value.left), **evaluated(wheel, file, value.right)}
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        place = wheel.resolve(file, value.value.id)
        return packed(wheel, *place) if place else {}
    try:
        found = ast.literal_eval(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def calls_in(wheel: Wheel, file: str, name: str) -> Iterator[ast.Call]:
    """Return the calls in the classes that a model consists of."""
    for place in wheel.reachable(file, name):
        nodes = ast.walk(wheel.classes(place[0])[place[1]])
        yield from (node for node in nodes if isinstance(node, ast.Call))


if __name__ == "__main__":
    main()
