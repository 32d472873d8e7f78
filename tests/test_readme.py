"""The README says what the commands and tables say."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import pytest
import yaml

from vexport.cli import cli
from vexport.scenario import Scenario
from vexport.schemes import all_schemes

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?: {4}|      - run: )(vexport .*)$", README.replace("\\\n", ""), flags=re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_options_exist(line: str) -> None:
    _, name, *rest = line.split(" #")[0].split()
    parameters = cli.commands[name].params
    options = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= options


def test_enough_commands_were_found() -> None:
    assert {line.split()[1] for line in COMMANDS} >= {"run", "quantize", "check", "load", "eval", "report"}


def test_every_scheme_is_in_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\|.*?\| (\d+)", README, flags=re.MULTILINE))
    assert rows == {scheme.name: str(scheme.family.least_sm) for scheme in all_schemes()}


def test_the_scenario_shown_is_one() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    scenarios = [block for block in blocks if "rules:" in block]
    assert len(scenarios) == 1
    assert Scenario.model_validate(yaml.safe_load(scenarios[0])).name == "qwen3-nvfp4"


def test_scripts_named_are_there() -> None:
    for name in re.findall(r"\./(scripts/\w+)", README):
        assert (Path(__file__).parent.parent / name).is_file(), name


# Stands for the run of hours on a GPU in the workflow: it leaves a report where `vexport run` would.
RUN = """#!{python}
import sys
from pathlib import Path
from vexport.cli import main
from vexport.reports import render
from tests.reports import sample
if sys.argv[1] == "run":
    folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder.mkdir()
    (folder / "report.json").write_text(render(sample.report(), "json"))
    (folder / "report.html").write_text(render(sample.report(), "html"))
else:
    main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a workflow: the action it uses with its options, or the line it runs."""

    uses: str
    run: str
    options: Mapping[str, object]


def workflows() -> Iterator[tuple[Step, ...]]:
    for block in re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL):
        for job in yaml.safe_load(block).get("jobs", {}).values():
            yield tuple(
                Step(uses=step.get("uses", ""), run=step.get("run", ""), options=step.get("with", {}))
                for step in job["steps"]
            )


@pytest.mark.parametrize("steps", list(workflows()), ids=("check", "nightly"))
def test_a_workflow_passes_in_a_fresh_checkout(
    steps: tuple[Step, ...], good: Callable[[str], Path], tmp_path: Path
) -> None:
    workspace, summary = tmp_path / "repository", tmp_path / "summary.md"
    copytree(good("W8A8"), workspace / "path" / "to" / "checkpoint")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vexport").write_text(RUN.format(python=sys.executable))
    (tmp_path / "bin" / "vexport").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_WORKSPACE": str(workspace),
        "GITHUB_RUN_ID": "42",
    }
    called = [step.run for step in steps if step.run and not step.run.startswith("pip install ")]
    assert called
    for line in called:
        ran = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", line],
            cwd=workspace,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, (line, ran)
    for step in steps:
        if "upload-artifact" in step.uses:
            assert all((workspace / name).is_file() for name in str(step.options["path"]).split())
    if any(line.startswith("vexport check") for line in called):
        assert "PASS" in summary.read_text()


def test_the_checkout_of_a_checkpoint_fetches_its_files() -> None:
    checked = [steps for steps in workflows() if any("vexport check" in step.run for step in steps)]
    checkouts = [step for steps in checked for step in steps if step.uses.startswith("actions/checkout")]
    assert [step.options["lfs"] for step in checkouts] == [True]
