"""Each rule states its claim: vLLM refuses, uses wrong values, or runs another precision."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "vexport"


def test_every_finding_states_claim() -> None:
    """The field has a default for tests only. mypy checks the helpers."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Finding", "Finding.of"):
                names = {keyword.arg for keyword in node.keywords}
                assert "claim" in names, f"{file}:{node.lineno}"
