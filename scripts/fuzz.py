#!/usr/bin/env python
"""Compare vexport's readers with safetensors, compressed-tensors and transformers on random files.

    scripts/fuzz.py [--cases 100000] [--seed 0] [--only headers|arguments|configs]

Prints the cases in which they differ, and ends with 1 if there are any. `vexport/docs/robustness.md` has the
result of the last whole run.
"""

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.checkpoint.configs import (  # noqa: E402
    argument_disagreement,
    config_disagreement,
    random_arguments,
    random_model_config,
)
from tests.checkpoint.headers import disagreement, random_file  # noqa: E402

SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="random files of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", choices=("headers", "arguments", "configs"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        kinds: Mapping[str, Callable[[random.Random], str | None]] = {
            "headers": lambda rng: disagreement(random_file(rng), file),
            "arguments": lambda rng: argument_disagreement(random_arguments(rng)),
            "configs": lambda rng: config_disagreement(random_model_config(rng)),
        }
        for kind, compare in kinds.items():
            if options.only in (None, kind):
                failures += _run(kind, compare, options.cases, options.seed)
    return int(failures > 0)


def _run(kind: str, compare: Callable[[random.Random], str | None], cases: int, seed: int) -> int:
    """The number of cases in which the two differ; the first are printed."""
    failures = 0
    for number in range(seed, seed + cases):
        difference = compare(random.Random(number))
        if difference:
            failures += 1
            if failures <= SHOWN:
                print(f"seed {number}: {difference}")
    print(f"{kind}: {cases:,} cases from seed {seed}, {failures:,} differences", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
