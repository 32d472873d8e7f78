"""Write vexport/architectures/versions/<version>.json: what one vLLM has and takes, read from its wheel.

    PYTHONPATH=. .venv/bin/python scripts/generate_versions.py 0.33.0 [0.31.0 ...] [--cache FOLDER]

The wheels of that vLLM and of `PINNED` are fetched into a cache and read as text. What is read are literals:
schemes and their least capabilities, widths, names of methods, and of the model classes what they fuse and
whether they quantize their tables of tokens, as far as `PINNED` has them otherwise.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from wheels import CACHE, MODELS, Wheel

from vexport.architectures import architecture_table

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures" / "versions"
QUANTIZATION = "vllm/model_executor/layers/quantization"
CT = f"{QUANTIZATION}/compressed_tensors"
REGISTRIES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
TABLE = "VocabParallelEmbedding"
Entry = dict[str, object]


def main() -> None:
    """Read each version and compare its classes with the pinned one's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the wheels are kept")
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    pinned = model_classes(Wheel("vllm", architecture_table().vllm, given.cache))
    for version in given.versions:
        wheel = Wheel("vllm", version, given.cache)
        classes, minor = model_classes(wheel), version.rpartition(".")[0]
        changed = {name: entry for name, entry in classes.items() if name in pinned and entry != pinned[name]}
        entry: Entry = {"vllm": version, **facts(wheel)}
        entry["absent"] = sorted(pinned.keys() - classes.keys())
        entry["added"] = {name: classes[name] for name in sorted(classes.keys() - pinned.keys())}
        entry["classes"] = changed
        (FOLDER / f"{minor}.json").write_text(text_of(entry))
        print(f"{minor}: {len(classes)} classes, {len(changed)} unlike {architecture_table().vllm}'s")


def text_of(entry: Mapping[str, object]) -> str:
    """A line for each key, and for each class."""
    parts = []
    for key, value in entry.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in items(value))
        parts.append(f" {json.dumps(key)}: " + (f"{{\n{rows}\n }}" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def items(value: object) -> Iterator[tuple[str, object]]:
    """The entries of an object."""
    yield from value.items() if isinstance(value, dict) else ()


def facts(wheel: Wheel) -> Entry:
    """Return what does not depend on a model class."""
    required = re.search(r"compressed-tensors==([\w.]+)", wheel.metadata)
    assert required is not None
    return {
        "compressed_tensors": required[1],
        "schemes": schemes(wheel),
        "asymmetric_widths": asymmetric_widths(wheel),
        "methods": methods(wheel),
    }


def schemes(wheel: Wheel) -> dict[str, int]:
    """The least capability of each scheme of linear layers."""
    found = {}
    for file in wheel.below(f"{CT}/schemes/"):
        for name in wheel.classes(file):
            if (least := returned(wheel, file, name)) is not None:
                found[name] = least
    return dict(sorted(found.items()))


def returned(wheel: Wheel, file: str, name: str) -> int | None:
    """The number that a class's get_min_capability returns, or that of the first base that has one."""
    node = wheel.classes(file)[name]
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef) and part.name == "get_min_capability":
            numbers = [
                each.value.value
                for each in ast.walk(part)
                if isinstance(each, ast.Return) and isinstance(each.value, ast.Constant)
            ]
            return next((number for number in numbers if isinstance(number, int)), None)
    for base in node.bases:
        place = wheel.imports(file).get(ast.unparse(base), (file, ast.unparse(base)))
        if place[1] in wheel.classes(place[0]) and place != (file, name):
            return returned(wheel, *place)
    return None


def asymmetric_widths(wheel: Wheel) -> list[int]:
    """Bits of packed integers with zero points."""
    tables = {
        ast.unparse(node.targets[0]): [ast.literal_eval(key) for key in node.value.keys if key is not None]
        for node in wheel.tree(f"{CT}/schemes/compressed_tensors_wNa16.py").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    return tables["WNA16_ZP_SUPPORTED_TYPES_MAP"]


def methods(wheel: Wheel) -> list[str]:
    """The names of methods of quantization."""
    tree = wheel.tree(f"{QUANTIZATION}/__init__.py")
    literal = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QuantizationMethods"
    )
    return [each.value for each in ast.walk(literal) if isinstance(each, ast.Constant)]  # type: ignore[misc]


def model_classes(wheel: Wheel) -> dict[str, Entry]:
    """Return what each registered class fuses, and how it builds its table of tokens."""
    found = {}
    for name, (module, defined) in sorted(registered(wheel).items()):
        file = wheel.file_of(module if "." in module else f".{module}", f"{MODELS}/registry.py")
        place = wheel.resolve(file, defined)
        if place is not None:
            read: Entry = {"fused": packed(wheel, *place), "embedding": embedding(wheel, *place)}
            found[name] = {key: value for key, value in read.items() if value}
    return found


def registered(wheel: Wheel) -> dict[str, tuple[str, str]]:
    """The module and the class of each architecture that a config can name."""
    found: dict[str, tuple[str, str]] = {}
    for node in wheel.tree(f"{MODELS}/registry.py").body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in REGISTRIES and isinstance(value, ast.Dict):
            found |= ast.literal_eval(ast.Expression(value))
    return found


def packed(wheel: Wheel, file: str, name: str) -> Mapping[str, list[str]]:
    """A class's packed_modules_mapping; empty where it is computed."""
    found = wheel.attribute(file, name, "packed_modules_mapping")
    return evaluated(wheel, *found) if found else {}


def evaluated(wheel: Wheel, file: str, value: ast.expr) -> Mapping[str, list[str]]:
    """A literal, another class's mapping, or one joined to another."""
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


def embedding(wheel: Wheel, file: str, name: str) -> str | None:
    """As `embedding` of generate_architectures.py."""
    given = [
        {word.arg for word in call.keywords if ast.unparse(word.value) != "None"}
        for place in wheel.reachable(file, name)
        for call in ast.walk(wheel.classes(place[0])[place[1]])
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == TABLE
    ]
    if not any("quant_config" in names for names in given):
        return None
    return "name" if any({"quant_config", "prefix"} <= names for names in given) else "class"


if __name__ == "__main__":
    main()
