"""`vexport explain`: every scheme, observer, check, page and section is explained, wrong names get a hint."""

import json
import re
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.command import vexport
from tests.test_layers import loaded_by
from vexport.cli.completion import complete_topic
from vexport.cli.entry import cli
from vexport.engine.dry.judge import CHECK as DRY_LOAD
from vexport.explain import all_sections, explain, find_section, topic_names
from vexport.explain.catalog import checks, observers, schemes
from vexport.explain.pages import fold
from vexport.explain.render import plain
from vexport.fidelity.roundtrip import CHECK as ROUND_TRIP
from vexport.types import ENGINE_CHECK

ROOT = Path(__file__).parent.parent.parent

ROWS = [
    (kind, next(iter(row.values())))
    for kind, rows in (("scheme", schemes()), ("observer", observers()), ("check", checks()))
    for row in rows
]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_what_is_listed_is_explained(kind: str, name: str) -> None:
    ran = vexport("explain", name)
    assert ran.code == 0
    assert ran.stdout.startswith(f"{name} ({kind})\n")
    assert len(ran.stdout.split()) > 25
    assert max(map(len, ran.stdout.splitlines())) <= 130


def test_a_scheme_has_its_row_its_tensors_and_its_source() -> None:
    (row,) = [row for row in schemes() if row["scheme"] == "FP8_BLOCK"]
    facts = explain("fp8-block").facts
    assert facts.items() >= {key: value for key, value in row.items() if key != "scheme"}.items()
    assert "weight_scale" in facts["stored as"]
    assert "blocks" in facts["shapes"]
    for _, name in ROWS[: len(schemes())]:
        assert "vllm/model_executor/" in explain(name).facts["source"], name


def test_names_are_of_one_thing_each() -> None:
    twice = {name for name, count in Counter(map(fold, topic_names())).items() if count > 1}
    assert not twice


def test_every_page_and_section_answers() -> None:
    assert len(all_sections()) > 100
    for section in all_sections():
        assert section.text.strip(), section
        assert {explain(name).page for name in section.names} == {section.page}


@pytest.mark.parametrize(
    ("name", "page", "says"),
    [
        ("margin", "evaluation", "loss"),
        ("INCONCLUSIVE", "statistics", "would settle"),
        ("exit codes", "ci", "130"),
        ("dry-load", "load", "headers"),
        ("--until-pass", "mixed", "six rounds"),
        ("kernel", "glossary", "cause"),
        ("canary", "load", "200 greedy tokens"),
    ],
)
def test_words_of_reports_and_options_are_explained(name: str, page: str, says: str) -> None:
    answer = json.loads(CliRunner().invoke(cli, ["explain", "--format", "json", "--", name]).stdout)
    assert answer["page"] == page
    assert says in " ".join(answer["text"].split())


@pytest.mark.parametrize(
    ("name", "meant"), [("nvfp5", "NVFP4"), ("completness", "completeness"), ("marign", "margin")]
)
def test_an_unknown_name_gets_the_nearest(name: str, meant: str) -> None:
    ran = vexport("explain", name)
    assert ran.code == 2
    assert ran.stdout == ""
    (line,) = ran.errors
    assert f"did you mean {meant}?" in line


def test_each_command_and_each_finding_can_be_looked_up() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "vexport").rglob("*.py")]
    findings = {name for text in sources for name in re.findall(r'\bcheck="([\w -]+)"', text)}
    assert len(findings) > 8
    for name in findings | set(cli.commands) - {"list", "explain"} | {ENGINE_CHECK, DRY_LOAD, ROUND_TRIP}:
        assert find_section(name), name


def test_another_name_of_a_section_gets_its_heading() -> None:
    assert vexport("explain", "awq").stdout.startswith("AWQ (topic): Methods of other tools\n")
    assert vexport("explain", "rounding").stdout.startswith("rounding (page)\n")


def test_without_a_name_all_are_listed() -> None:
    ran, listed = vexport("explain"), json.loads(vexport("explain", "--format", "json").stdout)
    assert ran.code == 0
    assert all(name in ran.stdout for _, name in ROWS)
    assert listed["pages"].keys() == {section.page for section in all_sections()}
    assert "exit codes" in map(str.lower, listed["pages"]["ci"])


def test_the_shell_completes_names() -> None:
    context = cli.commands["explain"].make_context("explain", [])
    found = [item.value for item in complete_topic(context, cli.commands["explain"].params[0], "nvfp4")]
    assert found == ["NVFP4", "NVFP4A16", "nvfp4_expanded_mse", "nvfp4_expanded_imatrix"]


def test_a_terminal_gets_no_markup() -> None:
    text = plain("See **[the page](page.md#a)**.\n\n```yaml\na: 1\n\nb: 2\n```\n\n- one\n- two")
    assert text == "See the page.\n\na: 1\n\nb: 2\n\n- one\n- two"


def test_a_terminal_gets_tables_in_columns() -> None:
    table = plain("## Codes\n| code | meaning |\n|---|---|\n| 0 | pass [x] |\n| 130 | interrupted |")
    assert table == "## Codes\n\ncode  meaning\n0     pass [x]\n130   interrupted"
    assert not any(line.startswith("|") for line in vexport("explain", "scenario").stdout.splitlines())


def test_explaining_loads_nothing_heavy() -> None:
    code = "from vexport.explain import explain; explain('NVFP4'); explain('mse'); explain('completeness')"
    assert not loaded_by(code) & {"torch", "transformers", "scipy", "numpy", "vllm", "rich.markdown"}


def test_every_option_and_command_is_explained() -> None:
    for name, command in cli.commands.items():
        assert vexport("explain", name).code == 0, name
        for option in command.params:
            if not isinstance(option, click.Option) or option.hidden:
                continue
            for spelled in (*option.opts, *option.secondary_opts):
                if spelled not in ("-q", "--quiet", "--debug", "-h", "-o", "--output", "--format"):
                    ran = vexport("explain", spelled)
                    assert ran.code == 0, (name, spelled)
                    assert len(ran.stdout.split()) > 4, (name, spelled)


def test_an_option_says_what_each_command_makes_of_it() -> None:
    said = vexport("explain", "--overwrite").stdout
    assert "run, compare: Start again in a run directory that exists." in said
    assert "quantize, merge, convert, repair: Replace OUT" in said


def test_every_key_of_a_scenario_is_explained() -> None:
    page = (ROOT / "vexport" / "docs" / "scenario.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(keys) > 70
    for key in keys:
        assert explain(key).text, key
        assert explain(key.rpartition(".")[2]).text, key
    ran = vexport("explain", "serve.compute")
    assert ran.stdout.startswith("serve.compute (scenario key)\n\n  default           [cpu]\n")


@pytest.mark.parametrize(
    ("name", "ours"), [("int4", "W4A16"), ("FP4", "NVFP4"), ("gptq", "W4A16 with --rounding gptq")]
)
def test_schemes_of_other_tools_are_answered_by_ours(name: str, ours: str) -> None:
    ran = vexport("plan", ROOT / "scenarios" / "demo" / "model", "--scheme", name)
    assert ran.code == 2
    assert f"(did you mean {ours}?)" in ran.stderr
