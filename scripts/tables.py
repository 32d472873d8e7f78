"""Parse the options of the generators of architectures/generated, and write their tables."""

import argparse
import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "vexport" / "architectures" / "generated"


def arguments(description: str | None, name: str, *, classes: bool = False) -> argparse.Namespace:
    """Parse the options: `out`, the table, and with `classes` also the names of classes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if classes:
        parser.add_argument("classes", nargs="*", metavar="CLASS", help="only these")
        parser.add_argument(
            "--pinned", type=Path, metavar="SITE_PACKAGES", help="packages with the pinned vLLM"
        )
    parser.add_argument(
        "--out", type=Path, default=FOLDER / name, help="the table to write [default: vexport's]"
    )
    return parser.parse_args()


def known_classes(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the classes of the table vllm.json in a folder.

    If the folder has no table, use vexport's.
    """
    file = folder / "vllm.json"
    text = (file if file.is_file() else FOLDER / "vllm.json").read_text()
    found: dict[str, Any] = json.loads(text)["architectures"]
    return found


def embedding(calls: Iterable[ast.Call]) -> str | None:
    """Return how vLLM finds the config group of the embedding table.

    It is "name" if the model passes the table's name and the quantization config. It is "class" if
    the model passes only the config, and None if it never quantizes the table.
    """
    given = [
        {word.arg for word in call.keywords if ast.unparse(word.value) != "None"}
        for call in calls
        if name_of(call) == "VocabParallelEmbedding"
    ]
    if not any("quant_config" in names for names in given):
        return None
    return "name" if any({"quant_config", "prefix"} <= names for names in given) else "class"


def name_of(call: ast.Call) -> str:
    """Return the name of the called function or class, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]


def write_table(target: Path, table: Mapping[str, object], *by_row: str) -> None:
    """Write a line for each key, and for each entry of the objects in `by_row`."""
    lines = []
    for key, value in table.items():
        text = json.dumps(value)
        if key in by_row and isinstance(value, dict) and value:
            rows = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()
            )
            text = f"{{\n{rows}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    new = target.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    new.replace(target)
