"""Observers of other packages: code that may be imported without trust, and code that may not.

An imported module leaves a file, so every test also sees whether code has run.
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
from vexport.plan import own_code
from vexport.plan.own_code import untrusted_place

ROOT = Path(__file__).parents[2]
CODE = "from pathlib import Path\nPath({ran!r}).write_text('ran')\n"
OBSERVER = (
    "from vexport.observers import MemorylessMinMaxObserver\nclass "
    "C(MemorylessMinMaxObserver):\n    pass\n"
)


class Place:
    """A current folder, a folder of PYTHONPATH and a folder of installed packages."""

    def __init__(self, root: Path) -> None:
        self.current, self.named, self.installed = (
            root / name for name in ("current", "named", "installed")
        )
        self.ran = root / "ran"
        for folder in (self.current, self.named, self.installed):
            folder.mkdir()

    def write(self, file: Path) -> Path:
        """A module that leaves a file when it runs."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE.format(ran=str(self.ran)) + OBSERVER)
        return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Python as started by `python -m` in the current folder."""
    place = Place(tmp_path)
    monkeypatch.chdir(place.current)
    paths = [str(place.current), str(place.named), str(place.installed)]
    monkeypatch.setattr(sys, "path", [*paths, *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(place.named))
    monkeypatch.setattr(own_code, "_installed", lambda: [place.installed])
    importlib.invalidate_caches()
    yield place
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("evil", "good", "parent")
    ]:
        del sys.modules[name]


def refused(name: str, place: Place, *folders: Path) -> bool:
    found = untrusted_place(f"{name}:C", folders)
    assert not place.ran.exists()
    return found is not None


def test_the_current_folder_is_not_trusted(place: Place) -> None:
    """Module, package, submodule, namespace, compiled file, extension: all by their place."""
    place.write(place.current / "evil.py")
    assert refused("evil", place)
    (place.current / "evil.py").unlink()
    package = place.write(place.current / "evil" / "__init__.py")
    assert refused("evil", place)
    place.write(place.current / "evil" / "inner.py")
    assert refused("evil.inner", place)
    package.unlink()
    importlib.invalidate_caches()
    assert refused("evil.inner", place)  # a namespace package
    compiled = place.current / "evil.pyc"
    py_compile.compile(str(place.write(place.current / "x.py")), cfile=str(compiled))
    (place.current / "evil" / "inner.py").unlink()
    (place.current / "evil").rmdir()
    importlib.invalidate_caches()
    assert refused("evil", place)
    compiled.unlink()
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (place.current / f"evil{suffix}").write_bytes(b"no library")
    importlib.invalidate_caches()
    assert refused("evil", place)


def test_named_and_installed_folders_are_trusted(place: Place) -> None:
    place.write(place.named / "good.py")
    assert not refused("good", place)
    place.write(place.installed / "good2.py")
    assert not refused("good2", place)
    place.write(place.named / "parent" / "__init__.py")
    place.write(place.named / "parent" / "inner.py")
    assert not refused("parent.inner", place)
    assert not refused("nowhere", place)


def test_folders_next_to_a_scenario_are_not_trusted(place: Place) -> None:
    """Also if PYTHONPATH names them, and everything below them."""
    place.write(place.named / "good.py")
    assert refused("good", place, place.named)
    assert refused("good", place, place.named.parent)
    place.write(place.installed / "other.py")
    assert refused("other", place, place.installed)
    assert not refused("other", place, place.installed.parent)  # a virtual environment in a project


@pytest.mark.parametrize(
    "value", ["", ":", ".", "{current}", ":{current}:", "sub", "{current}/sub"]
)
def test_pythonpath_cannot_name_the_current_folder(
    value: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", value.format(current=place.current))
    monkeypatch.syspath_prepend(str(place.current / "sub"))
    place.write(place.current / "sub" / "evil.py")
    place.write(place.current / "evil2.py")
    assert refused("evil", place)
    assert refused("evil2", place)


def test_links_are_followed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(place.current / "file.py")
    (place.named / "evil.py").symlink_to(place.current / "file.py")
    (place.installed / "evil2.py").symlink_to(place.current / "file.py")
    assert refused("evil", place)
    assert refused("evil2", place)
    place.write(place.named / "real.py")
    (place.current / "evil3.py").symlink_to(place.named / "real.py")
    assert refused("evil3", place)
    link = place.current.parent / "link"
    link.symlink_to(place.current)
    monkeypatch.setenv("PYTHONPATH", str(link))
    monkeypatch.syspath_prepend(str(link))
    assert refused("file", place)


def test_package_hides_installed_package(place: Place) -> None:
    place.write(place.installed / "parent" / "__init__.py")
    place.write(place.installed / "parent" / "inner.py")
    assert not refused("parent.inner", place)
    place.write(place.current / "parent" / "__init__.py")
    place.write(place.current / "parent" / "inner.py")
    importlib.invalidate_caches()
    assert refused("parent.inner", place)


def test_archives(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, is_refused in ((place.current, "evil", True), (place.named, "good", False)):
        archive = folder / "modules.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"{name}.py", CODE.format(ran=str(place.ran)))
        monkeypatch.syspath_prepend(str(archive))
        monkeypatch.setenv("PYTHONPATH", str(archive))
        assert refused(name, place) is is_refused


@pytest.mark.parametrize("name", ["antigravity", "os", "sys", "this", "xml.sax"])
def test_the_standard_library_is_not_trusted(name: str, place: Place) -> None:
    assert refused(name, place)


def test_editable_projects(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path, or by the metadata of a project whose modules a finder maps."""
    for kind in ("path", "metadata"):
        project = tmp_path / kind
        place.write(project / f"{kind}_observers.py")
        monkeypatch.syspath_prepend(str(project))
        assert refused(f"{kind}_observers", place)
        if kind == "path":
            (place.installed / "project.pth").write_text(f"# by hand\nimport sys\n{project}\n")
        else:
            info = place.installed / "project-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Name: project\nVersion: 1.0\n")
            url = {"url": project.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))
        assert not refused(f"{kind}_observers", place)
        assert refused(f"{kind}_observers", place, project)


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


def test_commands_ask(
    llama: Path, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `quantize` and `run` refuse it and name the flag: from scenario, recipe and
    option.
    """
    folder = tmp_path / "theirs"
    folder.mkdir()
    place.write(folder / "evil.py")
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


@pytest.mark.parametrize(
    "argument",
    [
        "worker_cls: evil.C",
        "scheduler_cls: evil.C",
        "logits_processors: ['evil:C']",
        "reasoning_parser_plugin: evil.py",
        "kv_transfer_config: {kv_connector: C, kv_connector_module_path: evil}",
        "compilation_config: {backend: evil.C}",
    ],
)
def test_arguments_of_vllm_that_import_python(argument: str, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        f"name: a\nsource: {llama}\nrules:\n  - {{match: Linear, scheme: FP8_DYNAMIC}}\n"
        f"serve: {{engine_args: {{{argument}}}}}\n"
    )
    for command in (("plan", path), ("run", path, "--run-dir", tmp_path / "run")):
        ran = vexport(*command)
        assert ran.code == 2, ran.stderr
        assert f"serve.engine_args.{argument.partition(':')[0]}" in ran.stderr
        assert "--trust-remote-code" in ran.stderr


def test_python_m_next_to_a_module(llama: Path, tmp_path: Path) -> None:
    """The real interpreter, which puts the current folder on its path."""
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
