"""Quantizes a model by calibration text with vexport; `rounding.py` runs it.

    .venv/bin/python scripts/bench/rounding_own.py MODEL OUT SCHEME ROUNDING ROWS.jsonl COUNT SEQ_LEN

Prints the seconds of the command without imports; reading and writing count.
"""

import json
import sys
import time

# What the command imports when it calibrates.
from transformers import AutoModelForCausalLM, AutoTokenizer

from vexport.cli.entry import cli
from vexport.quantize import job

IMPORTED = (AutoModelForCausalLM, AutoTokenizer, job)


def main() -> None:
    """Calibrate, round, write."""
    model, out, scheme, rounding, data, count, tokens = sys.argv[1:]
    text = ["--calibration", data, "--samples", count, "--seq-len", tokens]
    command = ["quantize", model, out, "--scheme", scheme, "--rounding", rounding, *text, "--quiet"]
    start, cpu = time.perf_counter(), time.process_time()
    cli.main(command, standalone_mode=False)
    spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    print(json.dumps(spent))


if __name__ == "__main__":
    main()
