"""Environments with the metadata of a version of vLLM and without its code."""

import venv
from pathlib import Path


def environment_with(folder: Path, version: str, name: str = "vllm") -> Path:
    """Make an environment with an empty package vllm, and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").touch()
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"
