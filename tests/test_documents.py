"""The README and the pages match the commands, schemes, scenarios, observers and files."""

import ast
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.command import ALL_COMMANDS, ROOT
from tests.models import write_calibration
from vexport.formats.schemes import all_schemes
from vexport.records.observer_names import OBSERVERS
from vexport.reports import catalog
from vexport.scenario import Scenario

FILES = (
    ROOT / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    *(ROOT / "vexport" / "docs").glob("*.md"),
)
PAGES: Mapping[str, str] = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
PROSE = {
    page: re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for page, text in PAGES.items()
}
INLINE = {
    page: [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    for page, text in PROSE.items()
}
OPTIONS = {
    name: {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for name, command in ALL_COMMANDS.items()
}
# Pages for developers, pages that scripts write, and the README with its first block.
LONG_PAGES = {"CONTRIBUTING", "README", "rulebook"}
# Options of other tools, and of scripts.
OTHER_OPTIONS = {
    "--help",
    "--log_samples",
    "--nproc-per-node",
    "--quick",
    "--json",
    "--no-cache",
    "--check",
    "--only",
    "--page",
    "--out",
    "--skip",
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    """click parses the shown commands with their options, values and arguments."""
    for line in PAGES[page].replace("\\\n", " ").splitlines():
        if shown := re.match(r"^(?: {4}|\$ |\s+- run: )(?:[.]venv/bin/)?(vexport .*)$", line):
            _, name, *rest = shlex.split(re.split(r"\s+(?:#|>|&&)\s?", shown[1])[0])
            with ALL_COMMANDS[name].make_context(name, rest):
                pass
    known = OTHER_OPTIONS.union(*OPTIONS.values())
    for code in INLINE[page]:
        words = code.split()
        if re.match(r"vexport [a-z]", code):
            given = {word.partition("=")[0] for word in words if word.startswith("-")}
            assert given <= OPTIONS[words[1]] | OTHER_OPTIONS, code
        elif code.startswith("--"):
            assert words[0].partition("=")[0] in known, code


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_and_links_exist(path: Path) -> None:
    vllm = import_module("importlib.util").find_spec("vllm")
    for code in INLINE[path.stem]:
        name = code.split()[0].removeprefix("./")
        if re.match(r"(scripts|tests|scenarios|vexport)/[\w/.*-]+$", name):
            assert list(ROOT.glob(name)), name
        if name.startswith("vllm/") and vllm:
            assert (Path(vllm.origin).parent.parent / name).exists(), name
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[path.stem]):
        name, _, anchor = target.partition("#")
        if not target.startswith(("http:", "https:")):
            file = path.parent / name if name else path
            assert file.exists(), target
            assert not anchor or anchor in anchors(PROSE[file.stem]), target


@pytest.mark.parametrize("command", ["./scripts/demo", "./scripts/test"])
def test_fresh_machine_needs_one_command(command: str) -> None:
    """README and CONTRIBUTING show the same two commands. Each command sets everything up."""
    script = (ROOT / command).read_text(encoding="utf-8").splitlines()
    assert os.access(ROOT / command, os.X_OK)
    assert script.index("scripts/setup") < next(
        number for number, line in enumerate(script) if line.startswith("exec .venv/")
    )
    for page in ("README", "CONTRIBUTING"):
        shown = re.findall(
            rf"^    {re.escape(command)}(?: +--quick)? +#", PAGES[page], re.MULTILINE
        )
        assert shown, f"{page} does not show {command}"


def test_ci_runs_the_test_command() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert ci[-1].split()[0] == "./scripts/test"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [each["run"] for each in workflow["jobs"]["ci"]["steps"] if "run" in each] == [
        ".ci/run",
        "scripts/build dist",
    ]


def test_picture_shows_the_numbers_of_its_caption() -> None:
    """`scripts/report_picture.py` writes both from one run."""
    script = script_module("report_picture")
    caption = script.text_of((ROOT / ".github" / "report.png").read_bytes())
    assert caption.startswith("PASS: ")
    assert f"(.github/report.png)\n\n_{caption}_\n" in PAGES["README"]


def script_module(name: str) -> ModuleType:
    """Import a script of `scripts/`."""
    spec = spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(text: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_page_is_read_in_minutes() -> None:
    """A page has at most 800 words of prose, unless it says that it is a reference."""
    marks = ("    ", "|", "#", "<!--")
    for page, text in PROSE.items():
        lines = [line for line in text.splitlines() if not line.startswith(marks)]
        is_short = len(" ".join(lines).split()) <= 800
        assert is_short or "This page is a reference" in text or page in LONG_PAGES, page


def test_scheme_table_is_complete() -> None:
    cells = re.findall(
        r"^\| `(\w+)` \|.*?\|.*?\| (.+?) \| (.+?) \|", PAGES["schemes"], flags=re.MULTILINE
    )
    rows = {
        row["scheme"]: (row["loads from SM"], row["native from SM"]) for row in catalog.schemes()
    }
    assert {name: tuple(spans) for name, *spans in cells} == rows
    supports = {scheme.name: scheme.format.gpu_support(scheme.args) for scheme in all_schemes()}
    gpus = re.findall(
        r"^\| \w+ \([^)]*SM ([\d, ]+)\) \| (.+?) \| (.+?) \|", PAGES["README"], flags=re.MULTILINE
    )
    assert len(gpus) == 4
    for capabilities, *named in gpus:
        lowest, highest = (pick(map(int, capabilities.split(", "))) for pick in (min, max))
        for name in re.findall(r"`(\w+)`", " ".join(named)):
            assert (supports[name].full_from or lowest + 1) <= lowest
            assert not supports[name].refuses(highest)


def test_scenarios_pages_and_observers() -> None:
    shown = [(page, block) for page in PAGES for block in blocks(page, "yaml") if "rules:" in block]
    assert {page for page, _ in shown} >= {"README", "scenario"}
    for _, block in shown:
        assert Scenario.model_validate(yaml.safe_load(block)).rules
    names = re.findall(r"^\| `(\w+)` \|(?:[^|]*\|){3}$", PAGES["observers"], flags=re.MULTILINE)
    assert names == list(OBSERVERS)


def test_links_lead_to_every_page() -> None:
    reached: set[str] = set()
    waiting = ["README"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += re.findall(r"\]\((?:[\w./]+/)?([\w-]+)\.md", PAGES.get(page, ""))
    assert set(PAGES) <= reached


@pytest.mark.slow
def test_python_examples_import_and_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            imported = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
            assert imported
            for node in imported:
                module = import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").symlink_to(llama)
    write_calibration(tmp_path / "TEXT.jsonl")
    for block in (*blocks("observers-python", "python"), blocks("api", "python")[0]):
        shutil.rmtree("OUT", ignore_errors=True)
        exec(block.replace('data="TEXT"', 'data="TEXT.jsonl"'), {"__name__": "example"})
