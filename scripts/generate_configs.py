"""Write vexport/architectures/configs.json: what transformers asks of a config.json, and the classes it has.

Run after scripts/generate_architectures.py with vLLM's transformers:
`python scripts/generate_configs.py [--out TABLE.json]`.
Its code is read as text, nothing is imported: `strict` in huggingface_hub/dataclasses.py refuses a value that
is not of the type that a field is annotated with.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures"
BASE = "PreTrainedConfig"
LAYER_KINDS = "ALLOWED_ATTN_LAYER_TYPES"
# Classes that a config.json may name: whole models.
MODEL = re.compile(r"^class (\w+(?:Model|For[A-Z]\w+))\(", re.MULTILINE)
# Types whose values config.json can hold, and that can be told from each other there.
SIMPLE = ("None", "bool", "dict", "float", "int", "list", "str")
# The keys of a dict, of which none is required.
ROPE = "RopeParameters"
Fields = dict[str, list[str]]


def main() -> None:
    """Read the base of all configs, and for each model type its config and its models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "configs.json", help="where the table goes")
    target: Path = parser.parse_args().out
    table = json.loads((FOLDER / "vllm.json").read_text())
    package = transformers()
    base = ast.parse((package / "configuration_utils.py").read_text())
    common = next(node for node in base.body if isinstance(node, ast.ClassDef) and node.name == BASE)
    kinds = {kind: fields_of(folder_of(package, kind), kind) for kind in sorted(table["text_models"])}
    models = [path.parent for path in sorted(package.glob("models/*/modeling_*.py"))]
    entries: dict[str, object] = {
        "transformers": version("transformers"),
        "layer_kinds": sorted(layer_kinds(base)),
        "base": judged(annotated(common)),
        "fields": {kind: judged(fields, annotated(common)) for kind, fields in kinds.items() if fields},
        "models": {folder.name: [*classes(folder, table["architectures"])] for folder in models},
    }
    target.write_text(text_of(entries))
    print(f"{target.name}: {len(kinds)} text models of transformers {entries['transformers']}")


def text_of(entries: Mapping[str, object]) -> str:
    """A table with a line for each model type."""
    parts = []
    for key, value in entries.items():
        rows = value.items() if isinstance(value, dict) and key in ("fields", "models") else ()
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in rows)
        parts.append(f" {json.dumps(key)}: " + (f"{{\n{lines}\n }}" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def transformers() -> Path:
    """The folder of the package."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def folder_of(package: Path, kind: str) -> Path:
    """The folder of a model type; the text model of a multimodal type has none of its own."""
    own = package / "models" / kind
    return own if any(own.glob("configuration_*.py")) else own.with_name(kind.removesuffix("_text"))


def classes(folder: Path, known: Mapping[str, object]) -> Iterator[str]:
    """The models of a folder that vLLM has no class for."""
    for file in sorted(folder.glob("modeling_*.py")):
        yield from (name for name in MODEL.findall(file.read_text(encoding="utf-8")) if name not in known)


def layer_kinds(base: ast.Module) -> Iterator[str]:
    """The kinds of attention that `layer_types` may name."""
    for node in base.body:
        if isinstance(node, ast.Assign) and any(
            ast.unparse(target) == LAYER_KINDS for target in node.targets
        ):
            yield from (str(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant))


def fields_of(folder: Path, kind: str) -> Fields | None:
    """The own fields of a model type's config; None where its class inherits more than the common ones."""
    for file in sorted(folder.glob("configuration_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and is_config_of(node, kind):
                return annotated(node) if [ast.unparse(base) for base in node.bases] == [BASE] else None
    return None


def is_config_of(node: ast.ClassDef, kind: str) -> bool:
    """Whether a class says that it is the config of a model type."""
    return any(
        isinstance(line, ast.Assign)
        and ast.unparse(line.targets[0]) == "model_type"
        and isinstance(line.value, ast.Constant)
        and line.value.value == kind
        for line in node.body
    )


def annotated(node: ast.ClassDef) -> Fields:
    """The fields of a class with the types that each may have; none for any."""
    return {
        line.target.id: types_of(line.annotation)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def judged(fields: Fields, base: Mapping[str, list[str]] = MappingProxyType({})) -> Fields:
    """The fields that do not take any value, and those that do in the place of one that does not."""
    return {name: types for name, types in fields.items() if types or base.get(name)}


def types_of(annotation: ast.expr) -> list[str]:
    """The parts of a union; empty where one of them is no plain type, which takes any value."""
    parts = [ast.unparse(part) for part in union(annotation)]
    parts = [part for part in parts if part != ROPE or "dict" not in parts]
    return parts if all(part.partition("[")[0] in SIMPLE for part in parts) else []


def union(annotation: ast.expr) -> Iterator[ast.expr]:
    """The members of a union in order; of another type itself."""
    if isinstance(annotation, ast.BinOp):
        yield from union(annotation.left)
        yield from union(annotation.right)
    else:
        yield annotation


if __name__ == "__main__":
    main()
