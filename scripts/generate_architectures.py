"""Write vexport/architectures/vllm.json: what vLLM's model classes fuse, rename and never quantize.

Run in an environment with vLLM: `python scripts/generate_architectures.py`. Nothing is instantiated: class
attributes are read, and the source of a class and of the classes that it is made of is searched for the
tables of its loader (`stacked_params_mapping`), for layers built without `quant_config`, and for the
attribute that holds the language model (`_mark_language_model`).
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import vllm
from reordering import reordered, unread
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import WeightsMapper

TARGET = Path(__file__).parent.parent / "vexport" / "architectures" / "vllm.json"
MODELS = ("vllm.model_executor.models", "vllm.models", "vllm.model_executor.layers.mamba")
DEFAULT_EXPERTS = ("gate_proj", "down_proj", "up_proj")  # FusedMoE's own `ckpt_names`
EXPERT_LAYERS = ("FusedMoE", "SharedFusedMoE", "MoERunner", "RoutedExperts")
# A router could be quantized, at the price of its kernels (fused_moe/router/gate_linear.py): never asked for.
NEVER_QUANTIZED = ("Linear", "GateLinear")
REPLICATED = ("ReplicatedLinear", "GateLinear", "DeepSeekV2FusedQkvAProjLinear")
# Experts in one tensor of shape (experts, in, out): said to the layer, or done by Llama 4's own loader.
TRANSPOSED = ("is_fused_checkpoint_transposed=True", "def load_moe_expert_weights")
# Imported by multimodal classes for pictures and sound only; may be missing where the table is generated.
OPTIONAL_PACKAGES = ("torchvision", "torchaudio")
Table = dict[str, object]


class AnyName(type):
    """The type of a class that has any attribute: another such class."""

    def __getattr__(cls, name: str) -> "AnyName":
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class Absent(ModuleType):
    """Stands for an optional package that is not installed: any name in it is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the optional packages, after everything that is installed."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        wanted = fullname.partition(".")[0] in OPTIONAL_PACKAGES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def main() -> None:
    """Read each class; name those that cannot be imported here."""
    logging.disable(logging.WARNING)
    sys.meta_path.append(AbsentFinder())
    models = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}
    table: dict[str, Table] = {}
    described: set[type] = set()
    for architecture, (module, name) in sorted(models.items()):
        try:
            model = load_class(module, name)
            entry = describe(model)
            if "language_model" in entry or architecture in registry._TEXT_GENERATION_MODELS:
                table[architecture] = entry
                described.update(parts_of(model))
        except ImportError as error:
            print(f"left out {architecture}: {error}")
    inner = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in table}
    for loader in sorted(unread(sources(described))):
        print(f"{'.'.join(loader)} takes loaded tensors apart: read it, and add it to reordering.py")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items())
    head = f'{{\n "vllm": "{vllm.__version__}",\n "text_models": {json.dumps(inner)},\n "architectures": {{\n'
    TARGET.write_text(f"{head}{rows}\n }}\n}}\n")
    print(f"{TARGET.name}: {len(table)} classes of vLLM {vllm.__version__}")


def load_class(module: str, name: str) -> type:
    """A registered class; modules are named relative to vLLM's models unless they have a dot."""
    loaded: type = getattr(
        importlib.import_module(module if "." in module else f"{MODELS[0]}.{module}"), name
    )
    return loaded


def describe(model: type) -> Table:
    """The entry of one class; of a multimodal one, that of its language model with its own names added."""
    attributes, inner = language_models(model)
    parts = parts_of(model)
    packed = packed_modules([*parts, model])
    merged = {name: members for name, members in packed.items() if len(members) > 1}
    fused = {**stacked_modules(parts), **merged}
    entry: Table = {
        "fused": fused,
        "resolved": sorted(getattr(model, "packed_modules_mapping", None) or {}),
        "experts": expert_names(parts),
        "transposed_experts": any(mark in source(part) for part in parts for mark in TRANSPOSED),
        "stacked_experts": stacked_experts(parts),
        "reordered": reordered(sources([*parts, model])),
        "unquantized": [member for name in unquantized(parts) for member in fused.get(name, [name])],
        "row_parallel": named_layers(parts, lambda call: name_of(call) == "RowParallelLinear"),
        "replicated": named_layers(parts, is_replicated),
        "renames": renames(model),
        "language_model": sorted(attributes),
        "inner_unknown": bool(attributes) and not inner,
    }
    return {key: value for key, value in entry.items() if value not in ({}, [], None, False)}


def parts_of(model: type) -> list[type]:
    """The classes that a model, of a multimodal one its language model, is made of."""
    _, inner = language_models(model)
    return list(dict.fromkeys(part for root in (inner or [model]) for part in reachable(root)))


def sources(classes: Iterable[type]) -> dict[str, ast.Module]:
    """The syntax trees of classes by name."""
    return {part.__name__: tree(part) for part in classes}


@cache
def source(model: type) -> str:
    """The text of a class; empty where it has none."""
    try:
        return textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        return ""


@cache
def tree(model: type) -> ast.Module:
    """The syntax tree of a class."""
    return ast.parse(source(model))


def namespace(model: type) -> ModuleType:
    """The module that a class is written in."""
    return importlib.import_module(model.__module__)


@cache
def reachable(model: type) -> tuple[type, ...]:
    """The class, its bases and every module class that its source names, as far as they are models' code."""
    found: dict[type, None] = {}
    todo = [model]
    while todo:
        current = todo.pop()
        if current in found or not current.__module__.startswith(MODELS):
            continue
        found[current] = None
        todo.extend(base for base in current.__mro__[1:] if issubclass(base, nn.Module))
        names = {node.id for node in ast.walk(tree(current)) if isinstance(node, ast.Name)}
        values = [item for name in sorted(names) for item in listed(getattr(namespace(current), name, None))]
        todo.extend(value for value in values if isinstance(value, type) and issubclass(value, nn.Module))
    return tuple(found)


def listed(value: object) -> list[object]:
    """What a name may stand for: itself, or the values of a table of layer types."""
    return list(value.values()) if isinstance(value, dict) else [value]


def language_models(model: type) -> tuple[set[str], list[type]]:
    """The attributes that hold a wrapper's language model, and its classes where the source names them."""
    attributes: set[str] = set()
    classes: list[type] = []
    for owner in model.__mro__:
        blocks = [node for node in ast.walk(tree(owner)) if isinstance(node, ast.With) and marks(node)]
        for block in blocks:
            for node in ast.walk(block):
                attributes.update(assigned(node))
                classes.extend(named_class(node, owner))
        if attributes:
            return attributes, list(dict.fromkeys(classes))
    return set(), []


def marks(block: ast.With) -> bool:
    """Whether a block assigns the language model."""
    return any("_mark_language_model" in ast.unparse(item) for item in block.items)


def assigned(node: ast.AST) -> Iterator[str]:
    """The attributes of self that a statement assigns a module to."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    for target in targets:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield target.attr


def named_class(node: ast.AST, owner: type) -> Iterator[type]:
    """A model class that is called by name, or one that is named as the architecture to build."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        entry = registry._TEXT_GENERATION_MODELS.get(node.value)
        if entry is not None:
            yield load_class(*entry)
    if isinstance(node, ast.Name):
        value = getattr(namespace(owner), node.id, None)
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith(MODELS):
            yield value


def packed_modules(parts: list[type]) -> dict[str, list[str]]:
    """`packed_modules_mapping` of the classes, with what their source adds to it."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for fused, members in (getattr(part, "packed_modules_mapping", None) or {}).items():
            found.setdefault(fused, list(members))
        for node in ast.walk(tree(part)):
            if isinstance(node, ast.Assign) and "packed_modules_mapping[" in ast.unparse(node.targets[0]):
                key, members = literal(node.targets[0]), literal(node.value)
                if isinstance(key, str) and isinstance(members, list):
                    found.setdefault(key, members)
    return found


def literal(node: ast.AST) -> object:
    """The value of a literal, or the key of a subscript; None where it is computed."""
    try:
        return ast.literal_eval(node.slice if isinstance(node, ast.Subscript) else node)
    except (ValueError, TypeError):
        return None


def stacked_modules(parts: list[type]) -> dict[str, list[str]]:
    """What the loaders stack into one parameter: `orig_to_new_stacked` and literal (fused, member, shard)."""
    found: dict[str, list[str]] = {}
    for fused, member in [pair for part in parts for pair in (*mapped_pairs(part), *literal_pairs(part))]:
        left, right = leaf(fused), leaf(member)
        if left and right and left != right and "expert" not in f"{left}{right}":
            members = found.setdefault(left, [])
            if right not in members:
                members.append(right)
    return {fused: members for fused, members in found.items() if len(members) > 1}


def leaf(name: str) -> str:
    """The module's own name in a pattern of a loader (`.self_attn.qkv_proj.` -> qkv_proj)."""
    return name.removesuffix(".weight").strip(".").rpartition(".")[2]


def mapped_pairs(part: type) -> Iterator[tuple[str, str]]:
    """(fused, member) of a class's WeightsMapper."""
    mapper = getattr(part, "hf_to_vllm_mapper", None)
    if isinstance(mapper, WeightsMapper):
        for member, (fused, _) in mapper.orig_to_new_stacked.items():
            yield fused, member


def literal_pairs(part: type) -> Iterator[tuple[str, str]]:
    """(fused, member) of the lists that a class's load_weights goes through."""
    for node in ast.walk(tree(part)):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            values = literal(node)
            if isinstance(values, tuple) and isinstance(values[0], str) and isinstance(values[1], str):
                yield values[0], values[1]


def expert_names(parts: list[type]) -> list[str | None] | None:
    """The names of an expert's gate, down and up projections on disk; None for a class without experts."""
    calls = [call for part in parts for call in calls_in(part)]
    layers = [call for call in calls if name_of(call).startswith(EXPERT_LAYERS)]
    for call in calls:
        for keyword in call.keywords:
            if keyword.arg == "ckpt_names" and isinstance(names := literal(keyword.value), tuple):
                return list(names)
    for call in calls:
        names = {keyword.arg: literal(keyword.value) for keyword in call.keywords}
        gate, up = names.get("ckpt_gate_proj_name"), names.get("ckpt_up_proj_name")
        if isinstance(gate, str) and gate != up:
            return [gate, str(names["ckpt_down_proj_name"]), str(up) if up else None]
    return list(DEFAULT_EXPERTS) if layers else None


def calls_in(part: type) -> Iterator[ast.Call]:
    """Every call in the source of a class."""
    return (node for node in ast.walk(tree(part)) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    """What a call calls, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]


def unquantized(parts: list[type]) -> list[str]:
    """The linear layers that are never built with a quantization config, by the last part of their names."""
    plain: set[str] = set()
    quantizable: set[str] = set()
    for part in parts:
        for node in ast.walk(tree(part)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            called = name_of(node.value)
            if called.endswith(("Linear", "ParallelLMHead")):
                chosen = plain if is_plain(node.value, called) else quantizable
                chosen.update(layer_name(node.value, name) for name in assigned(node))
    return sorted(plain - quantizable)


def named_layers(parts: list[type], wanted: Callable[[ast.Call], bool]) -> list[str]:
    """The linear layers that are built as wanted, by the last part of their names."""
    return sorted(
        {
            layer_name(node.value, name)
            for part in parts
            for node in ast.walk(tree(part))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and wanted(node.value)
            for name in assigned(node)
        }
    )


def is_replicated(call: ast.Call) -> bool:
    """Whether every rank of tensor parallelism holds the whole layer."""
    whole = any(word.arg == "disable_tp" and literal(word.value) is True for word in call.keywords)
    return whole or name_of(call) in REPLICATED


def is_plain(call: ast.Call, called: str) -> bool:
    """Whether a layer is built without a quantization config."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "quant_config"]
    passed = any("quant_config" in ast.unparse(argument) for argument in call.args)
    is_none = bool(given) and isinstance(given[0], ast.Constant) and given[0].value is None
    return called in NEVER_QUANTIZED or is_none or not (given or passed)


def layer_name(call: ast.Call, attribute: str) -> str:
    """The last part of the prefix that a layer is built with, else the attribute that holds it."""
    for keyword in call.keywords:
        if keyword.arg == "prefix":
            tail = ast.unparse(keyword.value).strip("'\")").rpartition(".")[2]
            if tail.isidentifier():
                return tail
    return attribute


def stacked_experts(parts: list[type]) -> dict[str, str]:
    """Other names on disk for the experts that are stored in one tensor: suffix -> vLLM's suffix."""
    mappers = [getattr(part, "hf_to_vllm_mapper", None) for part in parts]
    return {
        old: new
        for mapper in mappers
        if isinstance(mapper, WeightsMapper)
        for old, new in mapper.orig_to_new_suffix.items()
        if new is not None and new.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }


def renames(model: type) -> dict[str, dict[str, str]]:
    """The checkpoint's names to vLLM's, as far as they place a module."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    found: dict[str, dict[str, str]] = {}
    for kind in ("regex", "substr", "prefix") if isinstance(mapper, WeightsMapper) else ():
        names = getattr(mapper, f"orig_to_new_{kind}").items()
        found[kind] = {getattr(old, "pattern", old): new for old, new in names if new is not None}
    return {kind: names for kind, names in found.items() if names}


if __name__ == "__main__":
    main()
