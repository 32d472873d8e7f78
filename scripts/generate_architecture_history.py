"""Write vexport/architectures/history.json: what model classes of older vLLM versions do otherwise.

    python scripts/generate_architecture_history.py TABLE.json=VLLM_FOLDER ...

Each TABLE.json is what `scripts/generate_architectures.py --out TABLE.json` wrote in an environment with that
version, VLLM_FOLDER its package: a class counts as absent only if that version's registry does not name it.
"""

import ast
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures"
REGISTRIES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
Entry = dict[str, object]


def main() -> None:
    """Compare every table with the current one."""
    current: dict[str, Entry] = json.loads((FOLDER / "vllm.json").read_text())["architectures"]
    history: dict[str, Entry] = {}
    for argument in sys.argv[1:]:
        table, _, package = argument.partition("=")
        raw = json.loads(Path(table).read_text())
        version = ".".join(raw["vllm"].split(".")[:2])
        history[version] = changes(current, raw["architectures"], registered(Path(package)))
        print(f"{version}: compared")
    versions = ",\n".join(f"{json.dumps(version)}: {rows(history[version])}" for version in sorted(history))
    (FOLDER / "history.json").write_text(f"{{\n{versions}\n}}\n")


def rows(found: Entry) -> str:
    """A class on each line."""
    classes = found["classes"]
    assert isinstance(classes, dict)
    entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in classes.items())
    return f'{{\n "absent": {json.dumps(found["absent"])},\n "classes": {{\n{entries}\n }}\n}}'


def changes(current: dict[str, Entry], old: dict[str, Entry], names: set[str]) -> Entry:
    """Classes of the current table that are absent, and entries that are new or differ."""
    return {
        "absent": sorted(current.keys() - names),
        "classes": {
            name: cleaned(entry, current.get(name, {}))
            for name, entry in sorted(old.items())
            if cleaned(entry, current.get(name, {})) != current.get(name)
        },
    }


def cleaned(entry: Entry, current: Entry) -> Entry:
    """An entry as the current script writes it: rows are reordered as in the current version, and an expert
    without a gate has no third name, which older versions call the empty one."""
    found = {key: value for key, value in entry.items() if key not in ("permuted", "reordered")}
    if "reordered" in current:
        found["reordered"] = current["reordered"]
    experts = entry.get("experts")
    return {**found, "experts": [name or None for name in experts]} if isinstance(experts, list) else found


def registered(package: Path) -> set[str]:
    """The model classes that a version's registry names."""
    tree = ast.parse((package / "model_executor" / "models" / "registry.py").read_text())
    found: set[str] = set()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in REGISTRIES and isinstance(value, ast.Dict):
            found |= {ast.literal_eval(key) for key in value.keys if key is not None}
    return found


if __name__ == "__main__":
    main()
