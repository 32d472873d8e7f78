"""The README says what the commands and tables say."""

import re
from pathlib import Path

import pytest
import yaml

from vexport.cli import cli
from vexport.scenario import Scenario
from vexport.schemes import all_schemes

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?: {4}|      - run: )(vexport .*)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_options_exist(line: str) -> None:
    _, name, *rest = line.split(" #")[0].split()
    options = {option for parameter in cli.commands[name].params for option in parameter.opts}
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
