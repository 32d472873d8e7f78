"""Record what versions of vLLM select for each scheme and GPU, in generated/gpu_cells.json.

    .venv/bin/python scripts/gpu_cells.py WHEEL_PYTHON... [--only PATTERN] [--checkpoints DIR]

Each WHEEL_PYTHON is the interpreter of an environment with vLLM's CUDA wheel. Its loaders load the
checkpoints of `wheel_kernels.py` dry, on every capability of `GENERATIONS` from SM 75 on. The table
lists the capabilities of each status, and of each precision and kernel of the quantized layers.
Static checks and plans read the kernels (`vexport/architectures/gpu_cells.py`), and
tests/checks/test_gpu_cells.py compares the statuses with the static rules. `--checkpoints` keeps
the checkpoints in a folder, so that a second call does not make them again. `--only` selects
checkpoints by name; the table keeps the cells of all others.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folders to import from: vexport and its tests, and the scripts beside this script.
sys.path[:0] = map(str, (ROOT, ROOT / "scripts"))

from dry_cells import layer_cells  # noqa: E402
from tables import FOLDER  # noqa: E402
from wheel_kernels import makers  # noqa: E402

from vexport.checks.vllm.stored_schemes import config_groups_of  # noqa: E402
from vexport.engine.dry.load import DryLoad  # noqa: E402
from vexport.files import to_json  # noqa: E402
from vexport.formats import written_format  # noqa: E402
from vexport.formats.gpus import GENERATIONS  # noqa: E402
from vexport.formats.schemes import canonical_name  # noqa: E402

TABLE = FOLDER / "gpu_cells.json"
CAPABILITIES = tuple(sm for sm in sorted(GENERATIONS) if sm >= 75)
# Checkpoints in one call. A dry load may take this many seconds.
TOGETHER, SECONDS = 32, 3600.0
EXPERTS = " experts"
# A report of a dry load as JSON, with the `args` of the checkpoint's scheme.
Report = Mapping[str, Any]


def made(folder: Path, only: str) -> list[Path]:
    """Make the checkpoints that are not in the folder yet, and return them."""
    checkpoints = []
    for title, make in makers(folder / "sources").items():
        if not re.search(only, title):
            continue
        if not (folder / title).is_dir():
            make(folder / title)
        checkpoints.append(folder / title)
    return checkpoints


def loaded(checkpoints: Sequence[Path], wheel_python: Path) -> Iterator[Report]:
    """Yield the report of each dry load."""
    for start in range(0, len(checkpoints), TOGETHER):
        some = checkpoints[start : start + TOGETHER]
        load = DryLoad(
            checkpoints=some,
            sm=CAPABILITIES,
            require="any",
            vllm_python=wheel_python.absolute(),
            timeout=SECONDS,
        )
        for checkpoint, report in zip(some, load.reports(), strict=True):
            yield {**json.loads(to_json(report)), "args": arguments(checkpoint)}


def arguments(checkpoint: Path) -> str:
    """Return the canonical name of a compressed-tensors checkpoint's scheme.

    It is "" for other methods, and if the weights are stored in an unusual format.
    """
    groups = (
        group
        for group in config_groups_of(checkpoint)
        if written_format(group.args) in (None, group.storage)
    )
    return next((canonical_name(group.args) for group in groups), "")


def recorded(report: Report) -> dict[str, Any]:
    """Return the capabilities of each status, precision and kernel of the quantized layers."""
    is_experts = Path(report["checkpoint"]).name.endswith(EXPERTS)
    whole = {cell.sm: cell.status for cell in layer_cells(report) if not cell.kind}
    kernels = {
        cell.sm: f"{cell.precision} {cell.kernel}".strip()
        for cell in layer_cells(report)
        if cell.kind and ("experts" in cell.kind) == is_experts and cell.precision != "W16A16"
    }
    cells: dict[str, dict[str, list[int]]] = {}
    for sm, status in whole.items():
        cells.setdefault(status, {}).setdefault(kernels.get(sm, ""), []).append(sm)
    ordered = {status: dict(sorted(cells[status].items())) for status in sorted(cells)}
    return {"args": report.get("args", ""), "cells": ordered}


def store(reports: Sequence[Report]) -> None:
    """Write the reports of one version into the table. Other checkpoints keep their cells."""
    (version,) = {report["vllm"].rpartition(".")[0] for report in reports}
    cells = {Path(report["checkpoint"]).name: recorded(report) for report in reports}
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    table[version] = dict(sorted({**table.get(version, {}), **cells}.items()))
    versions = []
    for minor in sorted(table):
        entries = table[minor].items()
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in entries)
        versions.append(f" {json.dumps(minor)}: {{\n{rows}\n }}")
    TABLE.write_text("{\n" + ",\n".join(versions) + "\n}\n")
    print(f"vLLM {version}: {len(cells)} checkpoints on {len(CAPABILITIES)} capabilities")


def main() -> None:
    """Record the cells of each version."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "wheel_python", type=Path, nargs="+", help="Interpreters with vLLM's CUDA wheel."
    )
    parser.add_argument("--only", default="", help="Checkpoints whose name this pattern matches.")
    parser.add_argument("--checkpoints", type=Path, help="Folder that keeps the checkpoints.")
    options = parser.parse_intermixed_args()
    with TemporaryDirectory() as name:
        checkpoints = made(options.checkpoints or Path(name), options.only)
        for wheel_python in options.wheel_python:
            store(list(loaded(checkpoints, wheel_python)))


if __name__ == "__main__":
    main()
