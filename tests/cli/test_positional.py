"""Usage errors show the corrected call if an output folder is given with -o."""

import click
import pytest
from click.testing import CliRunner

from vexport.cli.entry import cli


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("quantize MODEL -o OUT --scheme FP8", "vexport quantize MODEL OUT --scheme FP8"),
        ("quantize MODEL --scheme FP8 --output=OUT", "vexport quantize MODEL OUT --scheme FP8"),
        ("repair CHECKPOINT -o OUT", "vexport repair CHECKPOINT OUT"),
        ("demo -o DIR --overwrite", "vexport demo DIR --overwrite"),
    ],
)
def test_output_option_shows_corrected_call(words: str, call: str) -> None:
    ran = CliRunner().invoke(cli, words.split(), prog_name="vexport", standalone_mode=False)
    assert isinstance(ran.exception, click.UsageError)
    assert f"Call `{call}`." in ran.exception.message
    assert "positional argument" in ran.exception.message


@pytest.mark.parametrize("words", ["quantize MODEL --scheme FP8", "quantize -o OUT", "demo --foo"])
def test_other_usage_errors_are_unchanged(words: str) -> None:
    ran = CliRunner().invoke(cli, words.split(), prog_name="vexport", standalone_mode=False)
    assert isinstance(ran.exception, click.UsageError)
    assert "positional" not in ran.exception.format_message()
