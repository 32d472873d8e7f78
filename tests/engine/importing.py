"""A worker that reports where its modules come from: `python -m tests.engine.importing ...`.

The request contains names of modules. The result has the file of each module, in the worker and in
a process that the worker spawns, and "" for a module that is not found.
"""

import importlib.util
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


def files_of(names: list[str]) -> dict[str, str]:
    found = {name: importlib.util.find_spec(name) for name in names}
    return {name: str(spec.origin) if spec else "" for name, spec in found.items()}


if __name__ == "__main__":
    names = json.loads(Path(sys.argv[1]).read_text())["names"]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        spawned = pool.submit(files_of, names).result()
    Path(sys.argv[2]).write_text(json.dumps({"worker": files_of(names), "spawned": spawned}))
