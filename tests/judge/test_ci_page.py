"""The workflows of the pages on CI: each step is run as written, or checked for its form."""

import os
import re
import shlex
import stat
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.command import ROOT, vexport
from tests.models import Good
from tests.reports.sample import WHOLE
from tests.scores.make import edit_results
from vexport.files import to_json

Step = Mapping[str, Any]
DOCS = ROOT / "vexport" / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("ci.md", "ci-vllm.md"))
ACTION = ROOT / ".github" / "action" / "action.yml"
KEYS = {"name", "id", "uses", "with", "run", "if", "env"}
# Inputs of the actions on the pages, from each action's `action.yml`.
INPUTS = {
    "actions/checkout": {"lfs"},
    "actions/setup-python": {"python-version"},
    "actions/cache": {"path", "key", "restore-keys"},
    "actions/cache/restore": {"path", "key", "restore-keys"},
    "actions/cache/save": {"path", "key"},
    "actions/upload-artifact": {"name", "path"},
    "actions/download-artifact": {"name", "path", "repository", "run-id", "github-token"},
    "aws-actions/configure-aws-credentials": {"role-to-assume", "aws-region"},
    "OWNER/vexport/.github/action": set(yaml.safe_load(ACTION.read_text())["inputs"]),
}
# Commands that need a network.
NETWORK = ("pip install ", "aws ", "python -m venv ")
# Commands that start engines, and so need a GPU or minutes. Their options are checked by click
# (test_documents.py).
ENGINES = ("vexport run ",)
DEPLOYED = "--vllm-python ~/vllm/bin/python"


def jobs() -> list[dict[str, Any]]:
    """Return the content of every block of YAML on the pages."""
    found = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in found]


def steps() -> list[Step]:
    """Return every step of the workflows, and of the parts of workflows."""
    found: list[Step] = []
    for content in jobs():
        if isinstance(content, list):
            found += content
        for job in content.get("jobs", {}).values() if isinstance(content, dict) else ():
            found += job["steps"]
    return found


STEPS = steps()
RUN = [step["run"] for step in STEPS if "run" in step]


def test_workflows_are_complete() -> None:
    (workflow,) = (each for each in jobs() if isinstance(each, dict) and "permissions" in each)
    assert set(workflow) == {"name", True, "permissions", "env", "jobs"}  # YAML reads `on` as True
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        names = {step.get("name") for step in job["steps"]}
        assert "Install vexport" in names
    used = set(re.findall(r"\$\{\{ env\.(\w+) \}\}|\$(VEXPORT|CHECKPOINT|SOURCE)\b", PAGE))
    assert {one or other for one, other in used} - {"VLLM"} <= set(workflow["env"])
    assert workflow["jobs"]["accuracy"]["needs"] == "check"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step.get("uses") or step["run"])[:40])
def test_form_of_steps(step: Step) -> None:
    assert set(step) <= KEYS
    assert ("uses" in step) != ("run" in step)
    if "uses" not in step:
        return
    action, _, version = step["uses"].partition("@")
    assert re.fullmatch(r"v\d+|TAG", version)
    assert set(step.get("with", {})) <= INPUTS[action]


@pytest.mark.parametrize("command", [each for each in RUN if each.startswith("pip install ")])
def test_requirements(command: str) -> None:
    """The requirement is valid, and its extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    address = "git+https://example.org/owner/vexport@v1"
    _, _, requirement, *options = shlex.split(command.replace("$VEXPORT", address))
    parsed = Requirement(requirement)
    assert parsed.name == "vexport"
    assert parsed.url == address
    assert parsed.extras <= set(extras)
    assert options in ([], ["--extra-index-url", "https://download.pytorch.org/whl/cpu"])


@pytest.fixture
def runner(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder like a runner's checkout, and its environment, in which `vexport` is a command."""
    folder, programs = tmp_path / "checkout", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    program = programs / "vexport"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m vexport "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    home = tmp_path / "home"
    (home / "vllm" / "bin").mkdir(parents=True)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_RUN_ID": "7",
        "VEXPORT_NO_VERIFY": "1",
    }
    return folder, environment


def ran(command: str, runner: tuple[Path, dict[str, str]], **environment: object) -> str:
    """Run a step as a runner does, and return what it prints. It must pass."""
    folder, variables = runner
    variables = variables | {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_command_is_run_or_needs_a_network() -> None:
    tested = {*CHECKS, *EVALUATIONS, *REPORTS}
    others = [
        command
        for command in RUN
        if command not in tested and not command.startswith((*NETWORK, *ENGINES))
    ]
    assert not others


CHECKS = [command for command in RUN if command.startswith("vexport check ")]
EVALUATIONS = [command for command in RUN if command.startswith("vexport eval ")]
REPORTS = [command for command in RUN if "nights/" in command]


@pytest.mark.parametrize("command", CHECKS)
def test_checks_run_as_written(
    command: str, runner: tuple[Path, dict[str, str]], good: Good, llama: Path
) -> None:
    if DEPLOYED in command:  # the interpreter that earlier steps install
        python = Path(runner[1]["HOME"]) / "vllm" / "bin" / "python"
        python.symlink_to(sys.executable)
    shown = ran(command, runner, CHECKPOINT=good("FP8_DYNAMIC"), SOURCE=llama)
    if "--format github" in command:
        assert "::" in shown
        assert Path(runner[1]["GITHUB_STEP_SUMMARY"]).read_text()
    if "-o check.xml" in command:
        assert (runner[0] / "check.xml").read_text().startswith("<?xml")


@pytest.mark.vllm
@pytest.mark.parametrize("command", EVALUATIONS)
def test_evaluations_run_as_written(
    command: str, runner: tuple[Path, dict[str, str]], lm_eval_runs: Path, copies: Path
) -> None:
    """lm-eval's results are the checkpoint, so that no engine starts."""
    for name in ("baseline", "twin"):  # its task `near` runs code
        edit_results(copies / name, lambda content: content["configs"].pop("near"))
    file = runner[0] / "baselines" / "accepted.json"
    file.parent.mkdir()
    tasks = [
        word
        for name in ("sums", "choices")
        for word in ("--task", lm_eval_runs / "tasks" / f"{name}.yaml")
    ]
    options = (*tasks, "--accept", file, "--output-dir", runner[0] / "first")
    made = vexport("eval", copies / "baseline", *options)
    assert made.code == 0, made.stderr
    shown = ran(command, runner, CHECKPOINT=copies / "twin")
    assert "PASS" in shown
    assert (runner[0] / "accuracy" / "report.html").is_file()
    assert (runner[0] / "accuracy" / "junit.xml").is_file()


def test_reports_of_nights_run_as_written(runner: tuple[Path, dict[str, str]]) -> None:
    nightly = runner[0] / "nightly"
    nightly.mkdir()
    (nightly / "report.json").write_text(to_json(WHOLE))
    for command in REPORTS:
        ran(command, runner)
    assert (runner[0] / "nights.html").read_text().startswith("<!DOCTYPE html>")
