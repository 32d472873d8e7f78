"""Imports go in one direction, slow imports are late, and only workers import vLLM."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vexport"
# From bottom to top. A module may import from its own package and from lower layers.
LAYERS = (
    {"caches", "version", "words"},
    {"rules"},
    {"errors"},
    {"__init__", "records"},
    {"files", "names", "bus_errors", "architectures", "numerics"},
    {"serving", "checkpoint", "outputs", "formats", "observers", "config_files", "foreign"},
    {"scenario", "calibration"},
    {"plan", "checks"},
    {"quantize", "fidelity", "engine"},
    {"inference"},
    {"scores"},
    {"repair", "judge", "reports"},
    {"run"},
    {"api"},
    {"cli"},
)
MOST_LAYERS = 15
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Packages that may be imported inside functions. The command line and checks import the code that
# they run, and `reports/catalog.py` imports the data that `vexport list` shows. Code that needs
# torch, numba or the hub's client imports it when it is needed. Workers are separate programs,
# which import vLLM, lm-eval and the parts of vexport for their request.
LATE_IMPORTS = {
    "api": ("vexport",),
    "checks": ("vexport",),
    "calibration": (
        *("compressed_tensors", "datasets", "huggingface_hub", "pandas", "pyarrow", "transformers"),
        *("PIL", "torch"),
    ),
    "cli": ("rich", "vexport"),
    "plan": ("vexport",),
    "quantize": ("vexport",),
    "checkpoint": ("huggingface_hub",),
    "repair": ("vexport",),
    "fidelity": ("vexport",),
    "formats": ("numpy", "vexport"),
    "numerics": ("torch",),
    "engine": ("vllm", "vexport"),
    "scores": ("pyarrow", "sacrebleu"),
    "reports": ("huggingface_hub", "vexport"),
    "inference": (
        *("vllm", "lm_eval", "datasets", "jsonschema", "PIL", "referencing", "torch", "vexport"),
    ),
}
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "lm_eval",
    "scipy",
    "matplotlib",
    "httpx",
    "compressed_tensors",
    "numpy",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Yield each module with the name of its part of the package.

    `__main__.py` counts as a part of `cli`.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield "cli" if part == "__main__" else part, path


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each imported module, and whether the import is inside a function.

    Imports for type checking are ignored.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, nested in imports(node):
            yield name, nested or inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module or "", False


def test_all_packages_have_a_layer() -> None:
    assert {name for name, _ in modules()} == set(RANK)
    assert len(LAYERS) <= MOST_LAYERS


def test_packages_do_not_import_each_other() -> None:
    arrows = {
        (part, name.split(".")[1])
        for part, _, name, _ in all_imports()
        if name.startswith("vexport.")
    }
    assert not {
        (importer, imported)
        for importer, imported in arrows
        if importer < imported and (imported, importer) in arrows
    }


@cache
def all_imports() -> list[tuple[str, Path, str, bool]]:
    """Return part, module, imported module, and whether the import is inside a function."""
    return [
        (part, path, name, late)
        for part, path in modules()
        for name, late in imports(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_imports_never_go_up() -> None:
    up = [
        f"{path} imports {name}"
        for part, path, name, _ in all_imports()
        if name.startswith("vexport.")
        and (target := name.split(".")[1]) != part
        and RANK[target] >= RANK[part]
    ]
    assert up == []


def test_runs_import_only_rendering_from_reports() -> None:
    drawn = {
        (path.name, name)
        for part, path, name, _ in all_imports()
        if part == "run" and name.startswith("vexport.reports")
    }
    data_class = "vexport.reports.run_record"
    rendering = {"vexport.reports", "vexport.reports.formatting"}
    assert {name for _, name in drawn} <= {*rendering, data_class}
    # making.py contains the check stage, which must not import the code of reports.
    assert "making.py" not in {file for file, _ in drawn}


def test_late_imports_are_listed() -> None:
    late = [
        f"{path} imports {name} inside a function"
        for part, path, name, inside in all_imports()
        if inside and name.split(".")[0] not in LATE_IMPORTS.get(part, ())
    ]
    early = [
        f"{path} imports {name}"
        for _, path, name, inside in all_imports()
        if not inside
        and name.split(".")[0] in ("vllm", "lm_eval")
        and "cpu_emulation" not in str(path)
    ]
    assert late + early == []


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_light_imports() -> None:
    """The command line, plans, quantizing without text, and verdicts do not import torch."""
    assert not loaded_by("import vexport.cli, vexport") & set(HEAVY)
    assert not loaded_by("import vexport.plan.build, vexport.scenario") & {
        "torch",
        "transformers",
        "vllm",
    }
    heavy = {"torch", "transformers", "compressed_tensors", "huggingface_hub", "safetensors"}
    assert not loaded_by("import vexport.quantize.job, vexport.reports.formatting") & heavy
    assert not loaded_by("import vexport.run.directory, vexport.judge.verdict") & heavy


@pytest.mark.parametrize("command", ["", "check", "quantize", "eval", "run"])
def test_help_loads_no_pydantic(command: str) -> None:
    help_of = [*command.split(), "--help"]
    loaded = loaded_by(
        f"from vexport.cli.entry import cli; cli.main({help_of}, standalone_mode=False)"
    )
    assert "vexport.cli.options" in loaded
    assert not loaded & {"pydantic", "pydantic_core", *HEAVY}


def test_check_loads_no_torch() -> None:
    loaded = loaded_by("import vexport.checks, vexport.reports, vexport.cli.check")
    assert not loaded & {"torch", "transformers", "scipy", "vllm"}
    packages = {name.split(".")[1] for name in loaded if name.startswith("vexport.")}
    assert not packages & {"plan", "scenario", "quantize", "scores", "judge", "repair", "run"}
    others = (
        "checkpoint.hub",
        "outputs.resumable",
        "reports.renderers.ci",
    )
    assert not loaded & {f"vexport.{name}" for name in others}


def test_scale_search_loads_no_transformers() -> None:
    assert not loaded_by("import vexport.quantize.scale_search") & {
        "transformers",
        "compressed_tensors",
    }
