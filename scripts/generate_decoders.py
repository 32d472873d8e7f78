"""Write vexport/architectures/decoders.json: what tensors the plain decoders among vLLM's classes have.

Run after scripts/generate_architectures.py, with vLLM and its transformers:
`python scripts/generate_decoders.py [--out TABLE.json]`. Their code is read as text, not imported: what
a class builds in vLLM's, what a config without a key means in transformers'.
"""

import argparse
import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures"
# Classes whose layers are attention and an MLP under Llama's names, and nothing else: each was held against
# vLLM on sound and spoiled checkpoints (tests/mutations).
PLAIN = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Endings of classes that a module takes from another one.
PARTS = ("MLP", "Attention", "DecoderLayer", "ForCausalLM")
REGISTRY = "_TEXT_GENERATION_MODELS"
ALWAYS = "always"
Entry = dict[str, object]


def main() -> None:
    """Read the module of each class, and the config of its model type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "decoders.json", help="where the table goes")
    target: Path = parser.parse_args().out
    table = json.loads((FOLDER / "vllm.json").read_text())
    registry = registered(package("vllm") / "model_executor" / "models" / "registry.py")
    kinds = {name: kind for kind, name in reversed(table["text_models"].items())}
    entries = {}
    for name in PLAIN:
        entry = built(modules(registry[name])) | defaults(kinds[name])
        experts = table["architectures"][name].get("experts", [])
        entries[name] = {key: value for key, value in (entry | {"experts": experts}).items() if value}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    head = f' "vllm": "{table["vllm"]}",\n "transformers": "{version("transformers")}"'
    target.write_text(f'{{\n{head},\n "decoders": {{\n{rows}\n }}\n}}\n')
    print(f"{target.name}: {len(entries)} classes of vLLM {table['vllm']}")


def package(name: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def registered(file: Path) -> dict[str, str]:
    """The module of each class that generates text."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and REGISTRY in ast.unparse(node)[: len(REGISTRY)]:
            assert node.value is not None
            return {name: str(module) for name, (module, _) in ast.literal_eval(node.value).items()}
    raise SystemExit(f"{file}: no {REGISTRY}")


def modules(name: str) -> list[ast.Module]:
    """A module of models, and after it those that it takes the classes of layers and models from."""
    file = package("vllm") / "model_executor" / "models" / f"{name}.py"
    tree = ast.parse(file.read_text())
    others = [
        str(node.module).rpartition(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and any(alias.name.endswith(PARTS) for alias in node.names)
    ]
    known = [other for other in others if (file.parent / f"{other}.py").is_file()]
    return [tree, *(each for other in known for each in modules(other))]


def built(trees: Sequence[ast.Module]) -> Entry:
    """What the layers of a class are made of."""
    attention = first(trees, lambda node: bool(calls(node, "QKVParallelLinear")))
    layer = first(trees, lambda node: "input_layernorm" in assigned(node))
    mlp = first(trees, lambda node: bool(calls(node, "MergedColumnParallelLinear")))
    assert attention is not None
    assert layer is not None
    biases = {
        projections: origins(argument(calls(attention, called)[0], "bias"), trees)
        for projections, called in (("qkv", "QKVParallelLinear"), ("o", "RowParallelLinear"))
    }
    attributes = assigned(layer)
    return {
        "biases": [part for names, found in biases.items() if ALWAYS in found for part in names],
        "configured": [
            part for names, found in biases.items() if "attention_bias" in found for part in names
        ],
        "mlp_biases": mlp is not None
        and "mlp_bias" in origins(argument(calls(mlp, "MergedColumnParallelLinear")[0], "bias"), trees),
        "head_norms": "q_norm" in assigned(attention),
        "mlp": next((name for name in attributes if "moe" in name), ""),
        "dense_layers": "mlp_only_layers" in ast.unparse(layer),
        "reads_head_dim": "head_dim" in ast.unparse(assigned(attention)["head_dim"]),
        "silu": mlp is not None and "!= 'silu'" in ast.unparse(mlp),
        "norms_above_one": bool(calls(layer, "GemmaRMSNorm")),
        "sandwiched": "pre_feedforward_layernorm" in attributes,
    }


def first(trees: Sequence[ast.Module], wanted: Callable[[ast.ClassDef], bool]) -> ast.ClassDef | None:
    """The first class as wanted, those of a class's own module before those that it takes from others."""
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return next((node for node in classes if wanted(node)), None)


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of a function or class within a node."""
    found = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return [call for call in found if ast.unparse(call.func) == name]


def assigned(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The attributes that a class always sets when it is built."""
    init = next((part for part in node.body if isinstance(part, ast.FunctionDef)), None)
    return {
        line.targets[0].attr: line.value
        for line in (init.body if init is not None else ())
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Attribute)
    }


def argument(call: ast.Call, name: str) -> ast.expr:
    """An argument of a call by its name; False where it is left out."""
    found = (keyword.value for keyword in call.keywords if keyword.arg == name)
    return next(found, ast.Constant(value=False))


def origins(value: ast.expr, trees: Sequence[ast.Module]) -> set[str]:
    """Where a value comes from: constants and keys of the config, through variables and arguments.

    `ALWAYS` is the constant True; names of keys come as they are.
    """
    found: set[str] = set()
    waiting, seen = [value], set[str]()
    while waiting:
        for part in ast.walk(waiting.pop()):
            if isinstance(part, ast.Constant):
                found.add(ALWAYS if part.value is True else str(part.value))
            elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "config":
                found.add(part.attr)
            elif isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                waiting += [each for tree in trees for each in given(tree, part.id)]
    return found


def given(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """What a module assigns to a variable or hands over as an argument of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == name:
            yield node.value
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            yield node.value


def defaults(kind: str) -> Entry:
    """What transformers' config of a model type takes where config.json has no such key."""
    folder = package("transformers") / "models" / kind.removesuffix("_text")
    fields: Mapping[str, object] = {}
    for file in folder.glob("configuration_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and f"model_type = '{kind}'" in ast.unparse(node):
                fields = {
                    ast.unparse(line.target): ast.literal_eval(line.value)
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant)
                }
    return {
        "head_dim": fields.get("head_dim"),
        "kv_heads": fields.get("num_key_value_heads"),
        "tied": fields.get("tie_word_embeddings"),
    }


if __name__ == "__main__":
    main()
