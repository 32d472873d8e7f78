"""The recipes for contributors name files that exist; the top of the repository stays small."""

import re
import subprocess

import pytest

from tests.packaging.environment import ROOT

# What may stand at the top of the repository, hidden files apart.
TOP = {"README.md", "pyproject.toml", "scenarios", "scripts", "tests", "vexport"}


def test_recipes_name_what_exists() -> None:
    """A path in backticks; `<name>` stands for what is added."""
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {ROOT / name for name in re.findall(r"`([\w./<>-]+)`", text) if "/" in name}
    missing = [path for path in named if not (path.parent if "<" in path.name else path).exists()]
    assert not missing


def test_the_top_of_the_repository_is_what_was_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP
