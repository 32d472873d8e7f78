"""Record on which GPUs a version of vLLM loads each scheme, in tests/checks/gpu_cells.json.

    .venv/bin/python scripts/gpu_cells.py WHEEL_PYTHON [--reports FILE]...

WHEEL_PYTHON is the interpreter of an environment with vLLM's CUDA wheel. Its loaders load the
checkpoints of `wheel_kernels.py` dry, on every capability of `GENERATIONS` from SM 75 on. The table
lists the capabilities of each status. tests/checks/test_gpu_cells.py compares it with the static
rules, and needs no wheel. `--reports` reads reports of `vexport load --dry --format json` of these
checkpoints instead of loading them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folders to import from: vexport and its tests, and the scripts beside this script.
sys.path[:0] = map(str, (ROOT, ROOT / "scripts"))

from dry_cells import layer_cells  # noqa: E402
from wheel_kernels import makers, vexport  # noqa: E402

from vexport.formats.gpus import GENERATIONS  # noqa: E402

TABLE = ROOT / "tests" / "checks" / "gpu_cells.json"
CAPABILITIES = tuple(sm for sm in sorted(GENERATIONS) if sm >= 75)
# Checkpoints in one call. A dry load may take 600 seconds.
TOGETHER = 8


def loaded(wheel_python: Path) -> Iterator[dict[str, Any]]:
    """Make the checkpoints, and yield the report of each dry load."""
    sm = ",".join(map(str, CAPABILITIES))
    with TemporaryDirectory() as name:
        folder, checkpoints = Path(name), list[Path]()
        for title, make in makers(folder / "sources").items():
            make(folder / title)
            checkpoints.append(folder / title)
        for start in range(0, len(checkpoints), TOGETHER):
            some, file = checkpoints[start : start + TOGETHER], folder / f"{start}.json"
            options = ("--sm", sm, "--vllm-python", wheel_python.absolute(), "--quiet")
            vexport("load", *some, "--dry", "-o", file, *options)
            yield from json.loads(file.read_text())


def recorded(report: dict[str, Any]) -> dict[str, list[int]]:
    """Return the capabilities of each status."""
    statuses: dict[str, list[int]] = {}
    for cell in layer_cells(report):
        if not cell.kind:
            statuses.setdefault(cell.status, []).append(cell.sm)
    return dict(sorted(statuses.items()))


def store(reports: Sequence[dict[str, Any]]) -> None:
    """Write the reports of one version into the table."""
    (version,) = {report["vllm"].rpartition(".")[0] for report in reports}
    cells = {Path(report["checkpoint"]).name: recorded(report) for report in reports}
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    table[version] = dict(sorted(cells.items()))
    versions = []
    for minor in sorted(table):
        entries = table[minor].items()
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in entries)
        versions.append(f" {json.dumps(minor)}: {{\n{rows}\n }}")
    TABLE.write_text("{\n" + ",\n".join(versions) + "\n}\n")
    print(f"vLLM {version}: {len(cells)} checkpoints on {len(CAPABILITIES)} capabilities")


def main() -> None:
    """Record the cells of one version."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel_python", type=Path, help="The interpreter with vLLM's CUDA wheel.")
    parser.add_argument("--reports", type=Path, action="append", help="Reports to read.")
    options = parser.parse_args()
    if options.reports:
        store([report for file in options.reports for report in json.loads(file.read_text())])
    else:
        store(list(loaded(options.wheel_python)))


if __name__ == "__main__":
    main()
