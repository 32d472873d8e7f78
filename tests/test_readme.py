"""The README and the reference pages say what the commands, schemes, scenarios and workflows are."""

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tests.command import ALL_COMMANDS
from vexport.formats.schemes import all_schemes
from vexport.reports import catalog
from vexport.scenario import Auto, Calibration, Evaluate, Rule, Scenario, Sensitivity
from vexport.scenario.serve import Serve

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "vexport" / "docs"
NAMES = sorted(path.stem for path in DOCS.glob("*.md"))
FILES = (ROOT / "README.md", *(DOCS / f"{name}.md" for name in NAMES))
PAGES: Mapping[str, str] = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
EVERY_PAGE = pytest.mark.parametrize("page", list(PAGES))
README_COLUMNS = 120
PAGE_COLUMNS = 120
# Where a line is longer than that: tables, and links and paths that cannot be broken.
_WHOLE = re.compile(r"^(\||\[|!\[|\s{4}|`?vllm/|- )")


def lines_of(text: str) -> Iterator[str]:
    """Lines with those that end in a backslash joined with the next."""
    yield from text.replace("\\\n", " ").splitlines()


def commands(text: str) -> Iterator[str]:
    """Every call of vexport that is shown as one: indented, or a step of a workflow."""
    for line in lines_of(text):
        if shown := re.match(r"^(?: {4}|\s+- run: )(?:[.]venv/bin/)?(vexport .*)$", line):
            yield re.split(r"\s+(?:#|>|&&)\s?", shown[1])[0]


def inline(text: str) -> Iterator[str]:
    """What stands between single backticks, outside of blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def yaml_blocks(text: str) -> Iterator[str]:
    yield from re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)


COMMANDS = [(page, line) for page, text in PAGES.items() for line in commands(text)]
MENTIONED = [
    (page, code) for page, text in PAGES.items() for code in inline(text) if re.match(r"vexport [a-z]", code)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_shown_is_accepted(page: str, line: str) -> None:
    """click parses it: command, options, their values and the number of arguments."""
    _, name, *rest = shlex.split(line)
    with ALL_COMMANDS[name].make_context(name, rest):
        pass


@pytest.mark.parametrize(("page", "code"), MENTIONED)
def test_a_command_mentioned_exists(page: str, code: str) -> None:
    _, name, *rest = code.split()
    options = {option for one in ALL_COMMANDS[name].params for option in (*one.opts, *one.secondary_opts)}
    assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= options | {"--help"}


@EVERY_PAGE
def test_an_option_named_alone_is_one_of_some_command(page: str) -> None:
    known = {
        option
        for command in ALL_COMMANDS.values()
        for one in command.params
        for option in (*one.opts, *one.secondary_opts)
    }
    of_others = {"--log_samples", "--nproc-per-node"}
    named = {code.split()[0].partition("=")[0] for code in inline(PAGES[page]) if code.startswith("--")}
    assert named <= known | of_others


def test_every_command_is_shown_somewhere() -> None:
    assert {shlex.split(line)[1] for _, line in COMMANDS} == set(ALL_COMMANDS)


@EVERY_PAGE
def test_lines_are_short_enough_to_read(page: str) -> None:
    limit = README_COLUMNS if page == "README" else PAGE_COLUMNS
    long = [line for line in PAGES[page].splitlines() if len(line) > limit and not _WHOLE.match(line)]
    assert not long


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if not target.startswith(("http:", "https:")):
            file = path.parent / name if name else path
            assert file.is_file(), target
            assert not anchor or anchor in anchors(file), target


@EVERY_PAGE
def test_files_named_are_there(page: str) -> None:
    for code in inline(PAGES[page]):
        name = code.split()[0].removeprefix("./")
        if re.match(r"(scripts|tests|scenarios|vexport)/[\w/.*-]+$", name):
            assert list(ROOT.glob(name)), name


@EVERY_PAGE
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_files_of_vllm_named_are_there(page: str) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.parent
    for code in inline(PAGES[page]):
        if code.startswith("vllm/"):
            assert (folder / code).exists(), code


def test_every_page_is_listed_and_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\(vexport/docs/(\w+)\.md", PAGES["README"]))
    assert linked == set(NAMES)


def test_every_scheme_is_in_the_table() -> None:
    cells = re.findall(r"^\| `(\w+)` \|.*?\|.*?\| (.+?) \| (.+?) \|", PAGES["schemes"], flags=re.MULTILINE)
    rows = {row["scheme"]: (row["loads from SM"], row["in full from SM"]) for row in catalog.schemes()}
    assert {name: spans for name, *spans in cells} == {name: list(spans) for name, spans in rows.items()}


def test_a_scheme_named_for_a_gpu_runs_there() -> None:
    rows = re.findall(r"^\| \w+ \(SM ([\d, ]+)\) \| (.+?) \| (.+?) \|", PAGES["README"], flags=re.MULTILINE)
    assert len(rows) == 4
    supports = {scheme.name: scheme.format.gpu_support(scheme.args) for scheme in all_schemes()}
    for capabilities, *cells in rows:
        lowest, highest = (pick(map(int, capabilities.split(", "))) for pick in (min, max))
        for name in re.findall(r"`(\w+)`", " ".join(cells)):
            assert (supports[name].full_from or lowest + 1) <= lowest
            assert not supports[name].refuses(highest)


SCENARIOS = [
    (page, block) for page, text in PAGES.items() for block in yaml_blocks(text) if "rules:" in block
]


@pytest.mark.parametrize(("page", "block"), SCENARIOS)
def test_a_scenario_shown_is_one(page: str, block: str) -> None:
    assert Scenario.model_validate(yaml.safe_load(block)).rules


def test_a_page_shows_a_scenario() -> None:
    assert {page for page, _ in SCENARIOS} >= {"README", "scenario"}


SECTIONS: Mapping[str, type[BaseModel]] = {
    "calibration": Calibration,
    "auto": Auto,
    "sensitivity": Sensitivity,
    "serve": Serve,
    "evaluate": Evaluate,
}


def documented() -> Mapping[str, str]:
    """The keys of the reference with their defaults."""
    return dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", PAGES["scenario"], flags=re.MULTILINE))


def defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a model with their defaults, as the reference writes them."""
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if field.is_required():
            default = "required"
        elif isinstance(value, BaseModel):
            default = "all defaults"
        elif isinstance(value, str):
            default = f"`{value}`"
        elif isinstance(value, tuple):
            default = f"`[{', '.join(map(str, value))}]`"
        else:
            default = f"`{json.dumps(value)}`"
        yield prefix + name, default


def test_the_scenario_reference_has_every_key_with_its_default() -> None:
    models: Mapping[str, type[BaseModel]] = {**SECTIONS, "rules": Rule}
    expected = dict(defaults(Scenario))
    for name, model in models.items():
        expected |= dict(defaults(model, f"{name}."))
    assert documented() == expected


def test_the_extras_listed_are_those_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = PAGES["installation"].partition("| extra |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(project["optional-dependencies"]) - {"dev"}
    of_none = set(re.findall(r"`(\w+)", table.splitlines()[2]))
    assert of_none <= set(ALL_COMMANDS)


def test_the_python_shown_is_python() -> None:
    blocks = [
        block for text in PAGES.values() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        imported = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
        assert imported
        for node in imported:
            module = import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
