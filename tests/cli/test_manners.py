"""Help, errors, colour, output files, and names in commands."""

import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from tests.command import ALL_COMMANDS, vexport
from tests.models import Good, write_tokenizer
from tests.mutations.edits import drop, spoiled
from tests.reports import sample
from tests.texts import assert_contains
from vexport.cli.entry import MAX_CHARACTERS, run_command
from vexport.cli.options import HEADINGS
from vexport.errors import InputError
from vexport.files import to_json
from vexport.formats.gpus import CARDS, GENERATIONS
from vexport.reports.catalog import all_sections, checks, find_section, observers, schemes
from vexport.rules import all_rules

DOWN = "model.layers.2.mlp.down_proj.weight_scale"
ESCAPE = "\x1b["


@pytest.fixture
def broken(good: Good, tmp_path: Path) -> Path:
    return spoiled(good("W8A8"), tmp_path / "broken", drop(DOWN))


# Most lines of a command's help on a terminal of 100 columns. Other commands have 50.
MOST_HELP_LINES = {"plan": 77, "check": 55, "quantize": 76, "load": 65, "eval": 126, "compare": 117}


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_no_arguments_show_help(arguments: tuple[str, ...]) -> None:
    ran = vexport(*arguments)
    assert (ran.code, ran.stderr) == (2, "")
    assert ran.stdout == vexport(*arguments, "--help").stdout


def test_usage_error_is_one_line() -> None:
    (line,) = vexport("list", "nonsense").stderr.splitlines()
    assert line.startswith("error: vexport list: ")
    assert line.endswith("See `vexport list --help`.")
    (line,) = vexport("check").stderr.splitlines()
    assert "Missing argument 'CHECKPOINT...'" in line


def test_commands_are_listed_in_order_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = vexport("--help").stdout
    listed = re.findall(r"^  (\w+) +[A-Z]", text.partition("Commands:")[2], flags=re.MULTILINE)
    assert listed == [*ALL_COMMANDS]
    order = [
        listed.index(name)
        for name in ("plan", "quantize", "check", "load", "eval", "run", "report")
    ]
    assert order == sorted(order)
    assert "..." not in text.partition("Commands:")[2].partition("Options:")[0]
    assert text.count("Exit codes:") == 1
    assert "130 interrupted" in text
    assert not re.search(r"interrupted", vexport("check", "--help").stdout)


@pytest.mark.parametrize("command", ALL_COMMANDS.values(), ids=lambda command: str(command.name))
def test_help_has_headings_and_examples(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = vexport(command.name, "--help").stdout.replace("--[no-]", "--")
    assert text.startswith(f"Usage: vexport {command.name} ")
    assert "Exit codes" in text
    assert len(text.splitlines()) <= MOST_HELP_LINES.get(str(command.name), 50)
    titles = re.findall(r"^(\w+):$", text, flags=re.MULTILINE)
    listed = text.partition(f"\n{titles[0]}:\n")[2]
    assert titles == [title for title in HEADINGS if title in titles]
    assert "Output" in titles
    shown = re.findall(r"^ +(--[\w-]+)|^ +-\w, (--[\w-]+)", listed, flags=re.MULTILINE)
    names = [first or second for first, second in shown]
    assert len(names) == len(set(names))
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert all(option.help for option in options)
    assert all(
        {*option.opts, *option.secondary_opts} & {*re.findall(r"--[\w-]+", listed)}
        for option in options
    )
    examples = re.findall(r"^    vexport (\w+) (.*)$", text, flags=re.MULTILINE)
    assert examples
    known = {name for parameter in command.params for name in parameter.opts}
    for name, rest in examples:
        assert name == command.name
        assert {word for word in rest.split() if word.startswith("-")} <= known


def test_finding_is_printed_once(broken: Path) -> None:
    ran = vexport("check", broken)
    assert ran.code == 1
    (line,) = ran.errors
    assert line.startswith(f"error: {broken}: ")
    assert_contains(line, "1 error", DOWN, "completeness")
    assert "uninitialized" not in line
    assert "uninitialized" in ran.stdout
    full = vexport("check", broken, "--format", "json")
    assert "uninitialized" in full.errors[0]
    assert json.loads(full.stdout)[0]["findings"][0]["where"] == DOWN


def test_several_failures_are_counted(broken: Path, good: Good, tmp_path: Path) -> None:
    other = spoiled(good("W8A8"), tmp_path / "other", drop(DOWN))
    names = (broken, good("W8A8"), other)
    ran = vexport("check", *names, "--static", "-o", tmp_path / "check.xml")
    assert ran.code == 1
    assert_contains(ran.errors[-1], "2 of 3 checkpoints", str(broken), str(other))
    assert str(good("W8A8")) not in ran.errors[-1]


def test_output_file_is_named(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    ran = vexport("list", "checks", "-o", file)
    assert (ran.stdout, ran.stderr) == ("", f"written: {file}\n")
    assert vexport("list", "checks", "-o", file, "--quiet").stderr == ""


def test_output_format_follows_file_name(broken: Path, tmp_path: Path) -> None:
    ran = vexport("check", broken, "-o", tmp_path / "new" / "check.json")
    assert (ran.code, ran.stdout) == (1, "")
    assert "uninitialized" in ran.errors[0]
    assert json.loads((tmp_path / "new" / "check.json").read_text())[0]["ok"] is False
    vexport("check", broken, "--output", tmp_path / "check.xml")
    assert ElementTree.parse(tmp_path / "check.xml").getroot().tag == "testsuites"
    vexport("check", broken, "--format", "text", "-o", tmp_path / "text.json")
    assert (tmp_path / "text.json").read_text().startswith("FAIL")
    refused = vexport("check", broken, "-o", tmp_path)
    assert refused.code == 2
    assert "is a folder" in refused.errors[0]


def test_commands_write_output_files(llama: Path, tmp_path: Path) -> None:
    for number, arguments in enumerate(
        [("list", "schemes"), ("plan", llama, "--scheme", "FP8_DYNAMIC")]
    ):
        file = tmp_path / f"{number}.json"
        ran = vexport(*arguments, "-o", file, "-q")
        assert (ran.code, ran.stdout) == (0, ""), ran
        assert json.loads(file.read_text())
    for command in ALL_COMMANDS.values():
        options = {name for parameter in command.params for name in parameter.opts}
        assert ("--format" in options) == ("-o" in options), command.name
        assert {"-q", "--quiet"} <= options


@pytest.mark.parametrize("no_colour", [False, True])
def test_terminal_has_colour(
    no_colour: bool, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.argv", ["vexport", "check", str(broken)])
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
        assert run_command() == 1
    assert (f"{ESCAPE}31m" in os.read(reader, 65536).decode()) == (not no_colour)
    os.close(reader)


def test_error_lines_are_escaped_and_bounded() -> None:
    name = "\x1b]0;owned\x07\x1b[2J\nerror: forged \u202e" + f"/{'y' * 200}" * 15
    ran = vexport("check", name)
    assert ran.code == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(r"error: \x1b]0;owned\x07\x1b[2J\nerror: forged \u202e/yyy")
    assert line.isprintable()
    assert len(line) < MAX_CHARACTERS + 100


@pytest.mark.parametrize("spelling", ["90", "9.0", "sm90", "SM_90", "sm 9.0", "90a"])
def test_capability_spellings(spelling: str, good: Good) -> None:
    expected = vexport("check", good("W4A16"), "--sm", "90", "--format", "json")
    assert (
        vexport("check", good("W4A16"), "--sm", spelling, "--format", "json").stdout
        == expected.stdout
    )


def test_check_names_versions_and_gpus(good: Good, tmp_path: Path) -> None:
    path = spoiled(good("W8A8"), tmp_path / "served", write_tokenizer)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    outcome, summary, *_ = vexport("check", path).stdout.splitlines()
    assert outcome == f"PASS  {path}"
    assert_contains(summary, "no findings", "vLLM 0.32, TP 1, any GPU")
    options = ("--tp", "1,2", "--sm", "80,9.0", "--vllm", "0.30")
    assert "vLLM 0.30, TP 1, 2, SM 80, 90\n" in vexport("check", path, *options).stdout
    assert "vLLM 0.32, TP 1, any GPU" in vexport("check", path, "--format", "github").stdout
    (report,) = json.loads(vexport("check", path, *options, "--format", "json").stdout)
    assert (report["vllm"], report["tp"], report["sm"]) == ("0.30", [1, 2], [80, 90])
    assert report["ok"] is True
    unknown = vexport("check", path, "--vllm", "0.99")
    assert unknown.code == 0
    assert "rules of vLLM 0.33" in unknown.stdout


def test_plan_refusal_is_printed_once(llama: Path) -> None:
    options = ("--scheme", "W4A16", "--tp", "3")
    ran = vexport("plan", llama, *options)
    assert ran.code == 2
    (line,) = ran.errors
    assert line.endswith("shown above [conclusion/refusals]")
    first = json.loads(vexport("plan", llama, *options, "--format", "json").stdout)["refusals"][0]
    assert first["got"] in ran.stdout
    assert first["got"] not in line
    assert first["got"] in vexport("plan", llama, *options, "--format", "json").errors[0]


ROOT = Path(__file__).parent.parent.parent
LISTED_NAMES = [
    next(iter(row.values())) for rows in (schemes(), observers(), checks()) for row in rows
]


def test_listed_names_are_explained() -> None:
    """Each scheme, observer, check and rule has one section in the documents."""
    for name in (*LISTED_NAMES, *all_rules()):
        assert len(find_section(name).text.split()) > 5, name
    names = Counter(name.casefold() for section in all_sections() for name in section.names)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("kernel", "load"),
        ("memory", "time-and-memory"),
        ("time", "time-and-memory"),
        ("exclude", "layers"),
        ("jsonl", "calibration-data"),
        ("vision", "models"),
        ("offline", "offline"),
        ("resume", "resume"),
        ("Ctrl-C", "resume"),
        ("limit", "evaluation"),
        ("exit", "output"),
        ("Actions", "ci"),
        ("untrusted", "models"),
        ("timeout", "evaluation"),
        ("ampere", "schemes"),
        ("NVIDIA H100 80GB HBM3", "schemes"),
        ("github actions", "ci"),
        ("llm-compressor", "migration"),
        ("recipe", "migration"),
        ("0.33", "vllm-versions"),
        ("--calibrate-on", "calibration"),
        ("docker", ""),
    ],
)
def test_words_of_users_are_explained(word: str, page: str) -> None:
    """An unknown word is an error with the three sections that mention it most."""
    if page:
        assert find_section(word).page == page
        return
    with pytest.raises(InputError) as unknown:
        find_section(word)
    hint = re.search(r"nearest: (.+?)\)", str(unknown.value))
    assert hint is not None
    for title in re.findall("`(.+?)`", hint[1]):
        assert word in find_section(title).text


def test_commands_and_gpus_are_explained() -> None:
    for name in (*ALL_COMMANDS, *CARDS, *GENERATIONS.values()):
        assert len(find_section(name).text.split()) > 5, name


def test_explain_prints_section() -> None:
    ran = vexport("explain", "fp8-block")
    page = (ROOT / "vexport" / "docs" / "storage.md").read_text(encoding="utf-8")
    assert ran.code == 0
    assert ran.stdout.strip() in re.sub(r"(?s)<!--.*?-->\n*", "", page)
    answer = json.loads(vexport("explain", "INCONCLUSIVE", "--format", "json").stdout)
    assert (answer["page"], "would be enough" in answer["text"]) == ("statistics", True)
    assert "\nstatistics: " in vexport("explain").stdout
    assert vexport("explain", "w4a16_g64").stdout == vexport("explain", "W4A16").stdout
    assert find_section("KV-cache").page == "fp8-kv-cache"
    assert find_section("kv_cache").page == "findings"


@pytest.mark.parametrize(("name", "nearest"), [("nvfp5", "NVFP4"), ("completness", "completeness")])
def test_unknown_name_suggests_nearest(name: str, nearest: str) -> None:
    ran = vexport("explain", name)
    assert (ran.code, ran.stdout) == (2, "")
    (line,) = ran.errors
    assert f"did you mean {nearest}?" in line


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("quantise", "MODEL"), "quantize"),
        (("Check", "MODEL"), "check"),
        (("plan", "MODEL", "--gpu", "L40X"), "L40"),
        (("load", "MODEL", "--dry", "--gpu", "H100-NVX"), "H100-NVL"),
    ],
)
def test_mistyped_word_suggests_nearest(arguments: tuple[str, ...], nearest: str) -> None:
    ran = vexport(*arguments)
    assert (ran.code, ran.stdout) == (2, "")
    (line,) = ran.errors
    assert f"Did you mean {nearest}" in line


@pytest.mark.parametrize(
    ("command", "file", "forms"),
    [
        ("check", "a.html", ".txt, .json, .xml"),
        ("check", "a.pdf", ".txt, .json, .xml"),
        ("plan", "a.xml", ".txt, .json"),
    ],
)
def test_unsupported_output_name_is_refused(
    command: str, file: str, forms: str, llama: Path, tmp_path: Path
) -> None:
    """The end of a file's name always matches the format of its content."""
    ran = vexport(command, llama, "-o", tmp_path / file)
    assert ran.code == 2
    assert file in ran.errors[0]
    assert f"ends in {forms}" in ran.errors[0]
    assert not (tmp_path / file).exists()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("AWQ", ["vexport has no AWQ", "--scheme W4A16_ASYM --rounding refit"]),
        ("auto-round", ["quantize with AutoRound", "check"]),
        ("gptq", ["--scheme W4A16 --rounding gptq"]),
        ("SmoothQuant", ["--scheme W8A8 --calibration DATA --smoothing 0.5"]),
    ],
)
def test_method_as_scheme_names_remedy(name: str, parts: list[str], llama: Path) -> None:
    ran = vexport("plan", llama, "--scheme", name)
    assert ran.code == 2
    assert_contains(ran.errors[0], *parts)


def test_unknown_scheme_is_short(llama: Path) -> None:
    (line,) = vexport("plan", llama, "--scheme", "W4A17").errors
    assert_contains(line, "'W4A17'", "did you mean W4A16?", "vexport list schemes")
    assert "MXFP8" not in line


def test_list_names_group_sizes() -> None:
    words = " ".join(vexport("list", "schemes").stdout.split())
    assert "W4A16_G64 and W4A16_CHANNEL" in words


def test_completion_after_unknown_command_has_no_error() -> None:
    words = {"COMP_WORDS": "vexport foo ", "COMP_CWORD": "2", "_VEXPORT_COMPLETE": "bash_complete"}
    code = "import sys; from vexport.cli import main; sys.argv = ['vexport']; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("is_calibrated", "has", "lacks"),
    [(False, "--calibration", "no such word"), (True, "more bits", "--calibration")],
)
def test_failed_report_proposes_calibration_first(
    tmp_path: Path, is_calibrated: bool, has: str, lacks: str
) -> None:
    failed = sample.report("FAIL")
    if not is_calibrated:
        failed = sample.with_made(failed, calibration=None)
    (tmp_path / "report.json").write_text(to_json(failed))
    ran = vexport("report", tmp_path)
    assert ran.code == 1
    assert_contains(ran.errors[0], has, "vexport explain sensitivity")
    assert lacks not in ran.errors[0]
    assert vexport("explain", "sensitivity").code == 0


# Commands that GitHub, Azure Pipelines and TeamCity find in a log.
COMMANDS_OF_CI = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)


@pytest.mark.parametrize("format_", ["text", "markdown", "html", "json", "junit"])
def test_reports_contain_no_commands_for_ci(format_: str, tmp_path: Path) -> None:
    """Names of tasks, prompts and responses come from other people."""
    names = ("::warning file=x::a", "b\n  ::error::c", "\t::stop-commands::d", "##vso[x]", "e:\n:f")
    rows = [
        {"task": name, "id": number, "score": number % 2, "answer": f"{name}\n{name}"}
        for name in names
        for number in range(60)
    ]
    worse = [row | {"score": 0, "answer": f"\n{row['task']}\n::g"} for row in rows]
    for side, content in (("base", rows), ("new", worse)):
        (tmp_path / f"{side}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    ran = vexport("verdict", tmp_path / "base.jsonl", tmp_path / "new.jsonl", "--format", format_)
    assert ran.code == 1, ran.stderr
    assert not COMMANDS_OF_CI.search(ran.stdout)
    assert not COMMANDS_OF_CI.search(ran.stderr)
    assert "warning file=x" in ran.stdout
