"""Observers from other packages: trusted and untrusted code.

An imported module writes a file, so that each test can check whether code ran.
"""

import importlib
import json
import os
import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import vexport
from vexport.api import plan
from vexport.errors import InputError
from vexport.plan import observer_code
from vexport.plan.observer_code import untrusted_place

ROOT = Path(__file__).parents[2]
CODE = "from pathlib import Path\nPath({ran!r}).write_text('ran')\n"
OBSERVER = (
    "from vexport.observers import MemorylessMinMaxObserver\nclass "
    "C(MemorylessMinMaxObserver):\n    pass\n"
)


class PythonPath:
    """Current folder, folder in PYTHONPATH, and folder of installed packages."""

    def __init__(self, root: Path) -> None:
        self.current, self.named, self.installed = (
            root / name for name in ("current", "named", "installed")
        )
        self.ran = root / "ran"
        for folder in (self.current, self.named, self.installed):
            folder.mkdir()

    def write(self, file: Path) -> Path:
        """Write a module that leaves a file when it runs."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE.format(ran=str(self.ran)) + OBSERVER)
        return file


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PythonPath]:
    """Set the import path as `python -m` does in the current folder."""
    python = PythonPath(tmp_path)
    monkeypatch.chdir(python.current)
    paths = [str(python.current), str(python.named), str(python.installed)]
    monkeypatch.setattr(sys, "path", [*paths, *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(python.named))
    monkeypatch.setattr(observer_code, "_site_packages", lambda: [python.installed])
    importlib.invalidate_caches()
    yield python
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("evil", "good", "parent")
    ]:
        del sys.modules[name]


def is_untrusted(name: str, python: PythonPath, *folders: Path) -> bool:
    """Return whether a module is untrusted, and check that its code did not run."""
    found = untrusted_place(f"{name}:C", folders)
    assert not python.ran.exists()
    return found is not None


def test_current_folder_is_not_trusted(python: PythonPath) -> None:
    """It may have modules, packages, namespace packages, compiled files and extensions."""
    python.write(python.current / "evil.py")
    assert is_untrusted("evil", python)
    (python.current / "evil.py").unlink()
    package = python.write(python.current / "evil" / "__init__.py")
    assert is_untrusted("evil", python)
    python.write(python.current / "evil" / "inner.py")
    assert is_untrusted("evil.inner", python)
    package.unlink()
    importlib.invalidate_caches()
    assert is_untrusted("evil.inner", python)  # a namespace package
    compiled = python.current / "evil.pyc"
    py_compile.compile(str(python.write(python.current / "x.py")), cfile=str(compiled))
    (python.current / "evil" / "inner.py").unlink()
    (python.current / "evil").rmdir()
    importlib.invalidate_caches()
    assert is_untrusted("evil", python)
    compiled.unlink()
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (python.current / f"evil{suffix}").write_bytes(b"no library")
    importlib.invalidate_caches()
    assert is_untrusted("evil", python)


def test_named_and_installed_folders_are_trusted(python: PythonPath) -> None:
    python.write(python.named / "good.py")
    assert not is_untrusted("good", python)
    python.write(python.installed / "good2.py")
    assert not is_untrusted("good2", python)
    python.write(python.named / "parent" / "__init__.py")
    python.write(python.named / "parent" / "inner.py")
    assert not is_untrusted("parent.inner", python)
    assert not is_untrusted("nowhere", python)


def test_scenario_folder_is_not_trusted(python: PythonPath) -> None:
    """Everything below the scenario's folder is untrusted, even if PYTHONPATH names it."""
    python.write(python.named / "good.py")
    assert is_untrusted("good", python, python.named)
    assert is_untrusted("good", python, python.named.parent)
    python.write(python.installed / "other.py")
    assert is_untrusted("other", python, python.installed)
    assert not is_untrusted(
        "other", python, python.installed.parent
    )  # a virtual environment in a project


@pytest.mark.parametrize(
    "value", ["", ":", ".", "{current}", ":{current}:", "sub", "{current}/sub"]
)
def test_current_folder_in_pythonpath_is_not_trusted(
    value: str, python: PythonPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", value.format(current=python.current))
    monkeypatch.syspath_prepend(str(python.current / "sub"))
    python.write(python.current / "sub" / "evil.py")
    python.write(python.current / "evil2.py")
    assert is_untrusted("evil", python)
    assert is_untrusted("evil2", python)


def test_links_to_untrusted_files(python: PythonPath, monkeypatch: pytest.MonkeyPatch) -> None:
    python.write(python.current / "file.py")
    (python.named / "evil.py").symlink_to(python.current / "file.py")
    (python.installed / "evil2.py").symlink_to(python.current / "file.py")
    assert is_untrusted("evil", python)
    assert is_untrusted("evil2", python)
    python.write(python.named / "real.py")
    (python.current / "evil3.py").symlink_to(python.named / "real.py")
    assert is_untrusted("evil3", python)
    link = python.current.parent / "link"
    link.symlink_to(python.current)
    monkeypatch.setenv("PYTHONPATH", str(link))
    monkeypatch.syspath_prepend(str(link))
    assert is_untrusted("file", python)


def test_package_shadows_installed_package(python: PythonPath) -> None:
    python.write(python.installed / "parent" / "__init__.py")
    python.write(python.installed / "parent" / "inner.py")
    assert not is_untrusted("parent.inner", python)
    python.write(python.current / "parent" / "__init__.py")
    python.write(python.current / "parent" / "inner.py")
    importlib.invalidate_caches()
    assert is_untrusted("parent.inner", python)


def test_archives_are_trusted_by_folder(
    python: PythonPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, is_refused in ((python.current, "evil", True), (python.named, "good", False)):
        archive = folder / "modules.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"{name}.py", CODE.format(ran=str(python.ran)))
        monkeypatch.syspath_prepend(str(archive))
        monkeypatch.setenv("PYTHONPATH", str(archive))
        assert is_untrusted(name, python) is is_refused


@pytest.mark.parametrize("name", ["antigravity", "os", "sys", "this", "xml.sax"])
def test_standard_library_is_not_trusted(name: str, python: PythonPath) -> None:
    assert is_untrusted(name, python)


def test_editable_projects_are_trusted(
    python: PythonPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable project is found by its path, or by its metadata if a finder maps its modules."""
    for kind in ("path", "metadata"):
        project = tmp_path / kind
        python.write(project / f"{kind}_observers.py")
        monkeypatch.syspath_prepend(str(project))
        assert is_untrusted(f"{kind}_observers", python)
        if kind == "path":
            (python.installed / "project.pth").write_text(f"# by hand\nimport sys\n{project}\n")
        else:
            info = python.installed / "project-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Name: project\nVersion: 1.0\n")
            url = {"url": project.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))
        assert not is_untrusted(f"{kind}_observers", python)
        assert is_untrusted(f"{kind}_observers", python, project)


def scenario(folder: Path, source: Path, name: str = "evil:C") -> Path:
    path = folder / "s.yaml"
    path.write_text(
        f"name: a\nsource: {source}\nrules:\n"
        f"  - {{match: Linear, scheme: W4A16_CHANNEL, observer: '{name}'}}\n"
    )
    return path


def recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        "quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n      ignore: [lm_head]\n"
        "      config_groups:\n        group_0:\n          targets: [Linear]\n          weights:\n"
        "            {num_bits: 8, type: float, strategy: channel, observer: 'evil:C'}\n"
        "          input_activations: {num_bits: 8, type: float, strategy: token, dynamic: true}\n"
    )
    return path


def test_commands_need_trust_flag(
    llama: Path, python: PythonPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `quantize` and `run` refuse untrusted code and name the flag.

    The code is named by a scenario, a recipe or an option.
    """
    folder = tmp_path / "theirs"
    folder.mkdir()
    python.write(folder / "evil.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for arguments in (
        ("plan", scenario(folder, llama)),
        ("run", folder / "s.yaml", "--run-dir", tmp_path / "run"),
        ("plan", llama, "--recipe", recipe(folder)),
        ("quantize", llama, tmp_path / "out", "--recipe", folder / "recipe.yaml"),
    ):
        ran = vexport(*arguments)
        assert ran.code == 2, ran.stderr
        assert "--trust-remote-code" in ran.stderr
        assert "evil.py" in ran.stderr
        assert not (tmp_path / "ran").exists()
    monkeypatch.chdir(folder)
    ran = vexport("plan", llama, "--scheme", "W4A16_CHANNEL", "--observer", "evil:C")
    assert ran.code == 2
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match="trust-remote-code"):
        plan(folder / "s.yaml")
    assert not (tmp_path / "ran").exists()
    ran = vexport("plan", folder / "s.yaml", "--trust-remote-code")
    assert ran.code == 0, ran.stderr
    assert (tmp_path / "ran").exists()
    assert plan(folder / "s.yaml", trust_remote_code=True).groups


def test_python_m_in_untrusted_folder(llama: Path, tmp_path: Path) -> None:
    """Run the real interpreter, which adds the current folder to its path."""
    (tmp_path / "evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")) + OBSERVER)
    scenario(tmp_path, llama)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:"}
    ran = subprocess.run(
        [sys.executable, "-m", "vexport", "plan", "s.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert "--trust-remote-code" in ran.stderr
    assert not (tmp_path / "ran").exists()
