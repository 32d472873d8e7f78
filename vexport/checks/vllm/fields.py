"""Types of config.json's values, as transformers' own config of the model type has them.

transformers 5 refuses a value of another type (`strict` in huggingface_hub/dataclasses.py), and with it vLLM
does. Its code is read as text: importing it takes seconds.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vexport.checks.vllm.decoder import SIZES
from vexport.checks.vllm.settings import Fault
from vexport.types import Json

BASE = "PreTrainedConfig"
# Keys of which other checks say what is wrong with them, of any type.
JUDGED_ELSEWHERE = ("architectures", "dtype", "rms_norm_eps", *SIZES)
LAYER_KINDS = "ALLOWED_ATTN_LAYER_TYPES"
SIMPLE: Mapping[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list,
    "dict": dict,
}


def wrong_types(kind: str, config: Mapping[str, Json]) -> Iterator[Fault]:
    """Values of another type than the fields of a model type have."""
    for key, annotation in _fields(kind).items():
        if key in config and key not in JUDGED_ELSEWHERE and not _fits(config[key], annotation):
            yield Fault(key=key, expected=ast.unparse(annotation), got=repr(config[key]))
    yield from _layer_types(config)


def _layer_types(config: Mapping[str, Json]) -> Iterator[Fault]:
    """One known kind of attention for each layer (validate_layer_type)."""
    given, known = config.get("layer_types"), _layer_kinds()
    if not isinstance(given, list) or not known:
        return
    for strange in sorted({str(one) for one in given} - known):
        yield Fault(key="layer_types", expected=f"each one of {', '.join(sorted(known))}", got=strange)
    layers = config.get("num_hidden_layers")
    if layers != len(given):
        yield Fault(key="layer_types", expected=f"one for each of {layers} layers", got=f"{len(given)}")


def code_of(kind: str, pattern: str) -> tuple[str, ...]:
    """transformers' files of a model type, as text; none where it does not have it."""
    folder = _transformers()
    if folder is None:
        return ()
    # The text model of a multimodal type has no folder of its own.
    places = [folder / "models" / name for name in (kind, kind.removesuffix("_text"))]
    files = next((found for place in places if (found := sorted(place.glob(pattern)))), [])
    return tuple(file.read_text(encoding="utf-8") for file in files)


@cache
def _transformers() -> Path | None:
    spec = find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _base() -> ast.Module:
    folder = _transformers()
    file = folder / "configuration_utils.py" if folder is not None else None
    return ast.parse(file.read_text(encoding="utf-8") if file is not None and file.is_file() else "")


@cache
def _layer_kinds() -> frozenset[str]:
    values = [
        node.value
        for node in _base().body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == LAYER_KINDS for target in node.targets)
    ]
    literals = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
    return frozenset(str(node.value) for node in literals)


@cache
def _fields(kind: str) -> Mapping[str, ast.expr]:
    """The fields of a model type's config by name; none for a type whose config has bases of its own."""
    for text in code_of(kind, "configuration_*.py"):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and _says(node, kind):
                bases = [ast.unparse(base) for base in node.bases]
                return {**_annotated(_base_class()), **_annotated(node)} if bases == [BASE] else {}
    return {}


def _base_class() -> ast.ClassDef | None:
    classes = (node for node in _base().body if isinstance(node, ast.ClassDef) and node.name == BASE)
    return next(classes, None)


def _says(node: ast.ClassDef, kind: str) -> bool:
    return any(
        isinstance(line, ast.Assign)
        and ast.unparse(line.targets[0]) == "model_type"
        and isinstance(line.value, ast.Constant)
        and line.value.value == kind
        for line in node.body
    )


def _annotated(node: ast.ClassDef | None) -> dict[str, ast.expr]:
    lines = node.body if node is not None else []
    return {
        line.target.id: line.annotation
        for line in lines
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _fits(value: Json, annotation: ast.expr) -> bool:
    """Whether a value is of an annotated type; any value is of a type that is not a plain one."""
    if isinstance(annotation, ast.BinOp):
        return _fits(value, annotation.left) or _fits(value, annotation.right)
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return value is None
    if isinstance(annotation, ast.Subscript):
        inner = ast.unparse(annotation.value)
        return isinstance(value, SIMPLE[inner]) if inner in SIMPLE else True
    expected = SIMPLE.get(annotation.id) if isinstance(annotation, ast.Name) else None
    if expected is None:
        return True
    return isinstance(value, expected) and not (expected is int and isinstance(value, bool))
