"""The examples of each `--help`: every one is accepted, and what needs no engine runs as it is written."""

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import vexport
from tests.models import save_llama
from vexport.cli.entry import cli

SCENARIO = "name: example\nsource: MODEL\nrules: [{match: Linear, scheme: FP8_DYNAMIC}]\n"
RECIPE = "quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {scheme: W8A8, targets: [Linear]}\n"


def examples() -> Iterator[list[str]]:
    """The words of each example, without `vexport`."""
    for name, one in cli.commands.items():
        shown = inspect.cleandoc(one.help or "").partition("Examples:\n")[2]
        lines = re.findall(r"^\s*vexport (.+)$", shown, re.MULTILINE)
        assert lines, f"{name} --help shows no example"
        yield from map(shlex.split, lines)


EXAMPLES = list(examples())
# In this order: what a command makes is there for those that follow.
HERE = ("plan", "quantize", "check", "repair", "list", "explain", "demo")
# Not into /tmp, and no second calibration in the tests.
RUN = [
    words
    for name in HERE
    for words in EXAMPLES
    if words[0] == name and not {"/tmp/demo", "--calibration"} & set(words)
]


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_is_accepted(words: list[str]) -> None:
    with cli.commands[words[0]].make_context(words[0], list(words[1:])):
        pass


def test_examples_run_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "MODEL", num_hidden_layers=2)
    (tmp_path / "SCENARIO.yaml").write_text(SCENARIO)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "OUT").symlink_to(tmp_path / "OUT")
    for shown in RUN:
        words = [word.replace("checkpoints/*", "checkpoints/OUT") for word in shown]  # as the shell does
        again = ["--overwrite"] if words[0] in ("quantize", "repair") else []
        ran = vexport(*words, *again)
        assert ran.code == 0, (words, ran.stderr)
        if words[0] == "quantize":
            assert (tmp_path / "OUT" / "config.json").is_file()
