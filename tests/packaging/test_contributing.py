"""What people who work on vexport are told: recipes name what exists, hooks and workflow run what is here."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.packaging.environment import ROOT

CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"
# What may stand at the top of the repository, hidden files apart.
TOP = {"README.md", "pyproject.toml", "scenarios", "scripts", "tests", "vexport"}
NAMED = re.compile(r"`([\w./<>-]+)`")


def named_files() -> list[str]:
    """What the recipes put in backticks and call by a path; `<name>` stands for what is added."""
    return sorted({name for name in NAMED.findall(CONTRIBUTING.read_text(encoding="utf-8")) if "/" in name})


def test_recipes_are_there() -> None:
    titles = re.findall(r"^## (.+)$", CONTRIBUTING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    wanted = ("scheme", "storage format", "observer", "rounding", "check", "architecture", "vLLM", "release")
    assert [word for word in wanted if not any(word in title for title in titles)] == []


@pytest.mark.parametrize("name", named_files())
def test_a_recipe_names_what_exists(name: str) -> None:
    path = ROOT / name
    assert (path.parent if "<" in path.name else path).exists()


def test_the_workflow_calls_the_script_that_holds_everywhere() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def hooks() -> list[dict[str, object]]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    listed: list[dict[str, object]] = repository["hooks"]
    return listed


def test_own_hooks_are_what_ci_asks() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert [hook["id"] for hook in hooks()] == ["ruff-format", "ruff-check", "mypy"]
    assert all(str(hook["entry"]).removesuffix(" --force-exclude") in ci for hook in hooks())


@pytest.mark.parametrize("number", [0, 1])
def test_a_hook_passes_a_file_of_ours(number: int) -> None:
    entry = str(hooks()[number]["entry"]).split()
    ran = subprocess.run([*entry, Path(__file__)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_top_of_the_repository_is_what_was_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP


def test_the_changelog_has_the_version_that_is_next() -> None:
    text = (ROOT / ".github" / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', (ROOT / "vexport" / "version.py").read_text())
    assert version is not None
    assert "## Unreleased" in text or f"## {version[1]}" in text
    assert {"### Added", "### Changed", "### Fixed"} <= set(text.splitlines())
