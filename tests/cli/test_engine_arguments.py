"""`--serve` and `--engine-arg` accept the same arguments of vLLM, and refuse the same."""

import click
import pytest

from tests.command import ROOT, vexport
from vexport.cli.arguments import parse_arguments

MODEL = ROOT / "scenarios" / "demo" / "model"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("max_num_seqs=4", {"max_num_seqs": 4}),
        ("--max-num-seqs=4", {"max_num_seqs": 4}),
        ("kv_cache_dtype=fp8", {"kv_cache_dtype": "fp8"}),
        ("load_format= a=b", {"load_format": " a=b"}),
        ("a=", {"a": ""}),
        ('hf_overrides={"b": [1, 2.5, null]}', {"hf_overrides": {"b": [1, 2.5, None]}}),
        ('{"kv-cache-dtype": "fp8", "b": true}', {"kv_cache_dtype": "fp8", "b": True}),
        ('{"a": 1, "a": 1}', {"a": 1}),
        ("{}", {}),
    ],
)
def test_accepted_forms(text: str, arguments: dict[str, object]) -> None:
    assert parse_arguments(text) == arguments


REFUSED = {
    "a": "neither KEY=VALUE",
    "=1": "neither KEY=VALUE",
    "--=1": "neither KEY=VALUE",
    "[1]": "neither KEY=VALUE",
    "{1": "not a JSON object",
    '{"": 1}': "neither KEY=VALUE",
    '{"a": 1, "a": 2}': "'a' twice",
    '{"a": 1, "a": true}': "'a' twice",
    '{"a-b": 1, "a_b": 2}': "a_b has two values: 1 and 2",
    'a={"b": 1, "b": 2}': "'b' twice",
    'a={"b": 1': "not JSON",
    "a=[1,": "not JSON",
    "a=NaN": "NaN is not a valid JSON number",
    '{"a": [-Infinity]}': "-Infinity is not a valid JSON number",
    "a=1e999": "1e999 is too large",
    'a="\\ud800"': "surrogate",
    f"a={'[' * 4000}": "nested too deeply",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_forms(text: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        parse_arguments(text)
    assert REFUSED[text] in refused.value.message


@pytest.mark.parametrize("text", ["a", '{"a": 1, "a": 2}', "a=NaN"])
def test_both_options_give_the_same_error(text: str) -> None:
    calls = (
        (("load", MODEL, "--engine-arg", text), "'--engine-arg': "),
        (("compare", MODEL, "--serve", "{}", "--serve", text), "'--serve': "),
    )
    messages = set()
    for words, option in calls:
        ran = vexport(*words)
        assert ran.code == 2
        messages.add(ran.errors[0].partition(option)[2].partition(" See ")[0])
    assert len(messages) == 1
    assert REFUSED[text] in messages.pop()


def test_repeated_argument() -> None:
    ran = vexport("load", MODEL, "--engine-arg", "a=1", "--engine-arg", '{"a": true}')
    assert ran.code == 2
    assert "a has two values: 1 and true" in ran.errors[0]
